"""Ranks that must hold the same weights are compared, and one that does not is named (F-DP-001)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.run.distributed.training import losses

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

HERE = "tests.trainer.run.distributed.test_weight_audit"
WORLD, STEPS = 4, 8
RING = {"exchange.topology": "ring", "training.max_steps": STEPS, "training.batch_size": 8}


def proofs(*held: str) -> list[bytes]:
    """Return proofs from a letter for the part of each rank, and one for its weights."""
    return [part.encode() * 32 + weights.encode() * 32 for part, weights in held]


@pytest.mark.parametrize(
    ("held", "wrong"),
    [
        (["aX", "aX", "aX", "aX"], []),
        (["aX", "aX", "aY", "aX"], [2]),
        (["aY", "aX", "aX", "aX"], [0]),
        (["aX", "aY", "aZ", "aX"], [1, 2]),
        (["aX", "aX", "aY", "aY"], [2, 3]),
        (["aX", "bY", "aX", "bY"], []),
        (["aX", "bY", "aZ", "bY"], [2]),
        (["aX"], []),
    ],
)
def test_those_that_differ_from_most_copies_of_their_part(
    held: list[str], wrong: list[int]
) -> None:
    from trainer.run.distributed.weight_audit import find_differing

    assert find_differing(proofs(*held)) == wrong


def changed(folder: str, data: str, output: str, settings: dict[str, Any]) -> str:
    """Return how a run ends on this rank; on rank 2 one bit of one weight flips in step 3."""
    import torch
    import torch.distributed as dist

    from tests.trainer.run.distributed.training import together
    from trainer.run.distributed.optimizer import ParallelAdamW
    from trainer.system.errors import RefusedError

    apply = ParallelAdamW.apply

    def flip(self: ParallelAdamW, step: int, learning_rate: float) -> float:
        norm = apply(self, step, learning_rate)
        if step == 3 and dist.get_rank() == 2:
            with torch.no_grad():
                weights = next(iter(self.local_vectors()["weights"].values())).view(-1)
                weights[:1].view(torch.int32).bitwise_xor_(1)
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelAdamW, "apply", flip)
        with pytest.raises(RefusedError) as error:
            together(folder, data, output, settings)
    dist.barrier()
    assert error.value.exit_code == 4
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "proved"),
    [
        ({"exchange.hash_every": 4}, [0, 2]),
        ({"exchange.hash_every": 100}, [0, 2]),
        ({"exchange.hash_every": 100, "checkpoint.sharded": True}, [0, 2]),
    ],
    ids=["every 4 steps", "at checkpoints", "at checkpoints in parts"],
)
def test_a_rank_whose_weights_changed_is_named_and_nothing_is_saved_after_it(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path, settings: dict[str, Any], proved: Any
) -> None:
    output = tmp_path / "run"
    often = RING | {"checkpoint.every": 2} | settings
    said = ranks.run(f"{HERE}:changed", str(model), str(data), str(output), often, world=WORLD)
    assert len(set(said)) == 1
    assert said[0].startswith(
        "step 4: rank 2 on host: weights differ from those of the other ranks: "
    )
    assert "\n" not in said[0]
    assert [path.name for path in (output / "checkpoints").rglob("step-*")] == ["step-000002"]
    assert [line["step"] for line in lines(output) if line.get("event") == "checkpoint"] == [2]
    assert [line["at_step"] for line in lines(output) if line.get("event") == "verified"] == proved


def lines(output: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines()))


def test_a_ring_of_four_trains_as_one_process_does(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    alone, ring = tmp_path / "alone", tmp_path / "ring"
    training = "tests.trainer.run.distributed.training"
    star = RING | {"exchange.topology": "star"}
    inputs = str(model), str(data)
    assert ranks.run(f"{training}:alone", *inputs, str(alone), star, world=1) == [0]
    settings = RING | {"exchange.hash_every": 4}
    ended = ranks.run(f"{training}:together", *inputs, str(ring), settings, world=WORLD)
    assert ended == ["all steps are done"] * WORLD
    assert losses(ring) == pytest.approx(losses(alone), abs=1e-4)
    assert len(losses(ring)) == STEPS

    folders = [output / "checkpoints/latest" for output in (ring, alone)]
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert mine.keys() == theirs.keys()
    for name, values in theirs.items():
        assert np.abs(mine[name] - values).max() < 1e-4, name
    proofs = [line for line in lines(ring) if line.get("event") == "verified"]
    assert [proof["at_step"] for proof in proofs] == [0, 4, 8]
    assert all(proof["ranks"] == list(range(WORLD)) for proof in proofs)
