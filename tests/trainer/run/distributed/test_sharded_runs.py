"""Runs that save in parts: they resume under another strategy, and end in the usual files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file

from tests.trainer.run.distributed.training import losses

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

pytestmark = pytest.mark.long

HERE = "tests.trainer.run.distributed.training"
STEPS = 10
SHARDED = {
    "method": "full",
    "training.max_steps": STEPS,
    "checkpoint.every": 2,
    "checkpoint.sharded": True,
}
FSDP = {"parallel.data": "fsdp"}
TENSOR = {"parallel.tensor": 2, "parallel.sequence": True}
PIPELINE = {"parallel.pipeline.stages": 2}


def resumed_from(output: Path) -> list[str]:
    """Return the folders, below that of the checkpoints, from which a run resumed."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    paths = [line["path"] for line in lines if line.get("event") == "resumed"]
    return [str(Path(path).relative_to((output / "checkpoints").absolute())) for path in paths]


def final_weights(output: Path) -> dict[str, Any]:
    return load_file(output / "checkpoints" / "latest" / "model.safetensors")


def test_stopped_runs_resume_under_other_strategies_to_the_files_of_an_undisturbed_one(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    """The first update after each change would show moments that were lost or misplaced."""
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "out"
    run = f"{HERE}:together_until"
    start = str(model), str(data)
    whole = SHARDED | {"checkpoint.sharded": False, "stop": None}
    ranks.run(run, *start, str(undisturbed), whole)
    ranks.run(run, *start, str(output), SHARDED | FSDP | {"stop": 3})
    # As if the ranks had been killed before the files of one process's form were written.
    shutil.rmtree(output / "checkpoints" / "step-000003")
    ranks.run(run, *start, str(output), SHARDED | TENSOR | {"stop": 5})
    ranks.run(run, *start, str(output), SHARDED | PIPELINE | {"stop": 7})
    ranks.run(run, *start, str(output), SHARDED | {"stop": None})

    assert resumed_from(output) == [f"sharded/step-{step:06d}" for step in (3, 5, 7)]
    assert losses(output) == pytest.approx(losses(undisturbed), abs=1e-5)
    curve = losses(output)
    assert curve[0] - curve[-1] > 0.001, "nothing was learned, and so nothing compared"
    mine, theirs = final_weights(output), final_weights(undisturbed)
    assert mine.keys() == theirs.keys()
    for name, values in theirs.items():
        assert mine[name] == pytest.approx(values, abs=1e-5), name
    latest = [folder / "checkpoints" / "latest" for folder in (output, undisturbed)]
    mine, theirs = ({path.name for path in folder.iterdir()} for folder in latest)
    assert mine == theirs
    status = json.loads((output / "status.json").read_bytes())
    assert (status["state"], status["checkpoint"]["step"]) == ("completed", STEPS)
    kept = sorted(path.name for path in (output / "checkpoints/sharded").glob("step-*"))
    assert kept == ["step-000007", "step-000008", "step-000010"]


def test_a_damaged_one_is_left_out_for_a_whole_one_that_is_newer_than_the_next(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    output, run = tmp_path / "out", f"{HERE}:together_until"
    start = str(model), str(data), str(output)
    ranks.run(run, *start, SHARDED | {"stop": 2})
    ranks.run(run, *start, SHARDED | {"checkpoint.sharded": False, "stop": 4})
    ranks.run(run, *start, SHARDED | FSDP | {"stop": 6})
    shutil.rmtree(output / "checkpoints" / "step-000006")
    part = next((output / "checkpoints/sharded/step-000006").glob("shard-00002*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    ranks.run(run, *start, SHARDED | {"checkpoint.sharded": False, "stop": None})
    assert resumed_from(output) == ["sharded/step-000002", "step-000004", "step-000004"]
    assert len(losses(output)) == STEPS + 2, "steps 5 and 6 are done again"


def test_without_ranks_a_newer_one_is_not_passed_over(
    ranks: Ranks, model: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    start = str(model), str(data), str(output)
    ranks.run(f"{HERE}:together_until", *start, SHARDED | {"stop": 2})
    shutil.rmtree(output / "checkpoints" / "step-000002")
    with pytest.raises(AssertionError, match="sharded, which only --distributed reads; resume"):
        ranks.run(f"{HERE}:alone", *start, SHARDED | {"checkpoint.sharded": False}, world=1)
