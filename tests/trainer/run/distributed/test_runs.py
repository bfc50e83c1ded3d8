"""Runs of 30 steps under every strategy against `trainer finetune` alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.covering import covering
from tests.trainer.replica.torch.parallel.models import write_drawn_model
from tests.trainer.run.distributed.training import losses
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.tracking.status import read_status

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

pytestmark = pytest.mark.long

HERE = "tests.trainer.run.distributed.training"
STEPS = 30
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": 2},
    "tp-sp": {"parallel.tensor": 2, "parallel.sequence": True},
    "fsdp-x-tensor": {"parallel.data": "fsdp", "parallel.tensor": 2},
    "pp": {"parallel.pipeline.stages": 2},
    "pp-x-ddp": {"parallel.pipeline.stages": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    # First, as most strategies then have it in the part that `make test` runs.
    "lora": {"task": "causal-lm", "lora.lora_rank": 4},
    "qlora": {"lora.lora_rank": 4, "model.quantization": "nf4"},
    "full": {"method": "full", "optimizer.learning_rate": 1e-4},
}
FAMILIES = {"full": "qwen3", "lora": "qwen2", "qlora": "llama"}

Spoken = Callable[[str], str]


@pytest.fixture(scope="module")
def spoken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    """Return a maker of models of each family with the tokenizer of the small one."""
    made: dict[str, str] = {}

    def make(model_type: str) -> str:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("spoken") / model_type
            write_drawn_model(folder, model_type, vocab_size=321)
            for file in model.glob("*token*"):
                shutil.copy(file, folder)
            made[model_type] = str(folder)
        return made[model_type]

    return make


@dataclass(frozen=True)
class Reference:
    """What one process trained with a method, and what it makes of it."""

    output: Path
    score: float
    tokens: list[list[int]] | None
    """None for a classifier."""
    merged: dict[str, np.ndarray] | None
    """None if all weights were trained."""


@pytest.fixture(scope="module")
def reference(
    ranks: Ranks, spoken: Spoken, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reference]:
    """Return what one process does, by the method."""
    made: dict[str, Reference] = {}

    def make(method: str) -> Reference:
        if method not in made:
            root, chosen = tmp_path_factory.mktemp("alone"), METHODS[method]
            output, folder = root / method, spoken(FAMILIES[method])
            settings = chosen | {"training.max_steps": STEPS}
            arguments = folder, data_of(method, data), str(output), settings
            assert ranks.run(f"{HERE}:alone", *arguments, world=1) == [0]
            (score,) = ranks.run(f"{HERE}:evaluated", str(output), chosen, world=1)
            tokens = merged = None
            if chosen.get("task") == "causal-lm":
                (tokens,) = ranks.run(f"{HERE}:continued", str(output), world=1)
            if method != "full":
                merged = merged_weights(output, root / "merged")
            made[method] = Reference(output, score, tokens, merged)
        return made[method]

    return make


def data_of(method: str, data: Path) -> str:
    """Return data for a method's task: labelled lines, or the same as texts."""
    if METHODS[method].get("task") != "causal-lm":
        return str(data)
    texts = data.with_name("texts.jsonl")
    lines = data.read_text().splitlines()
    texts.write_text(
        "".join(
            '{"text": ' + line.split('"input": ')[1].split(', "label"')[0] + "}\n" for line in lines
        )
    )
    return str(texts)


@pytest.mark.parametrize(("entry", "world"), [("alone", 1), ("together", 2)])
def test_early_stopping_counts_over_a_resume(
    ranks: Ranks, spoken: Spoken, data: Path, tmp_path: Path, entry: str, world: int
) -> None:
    """Weights that do not move have the loss of the first validation, of step 1."""
    settings = METHODS["lora"] | {
        "optimizer.learning_rate": 1e-12,
        "training.evaluate_every": 1,
        "training.early_stopping_patience": 3,
        "data.validation_fraction": 0.2,
    }
    output = tmp_path / "run"
    for most, reached in ((2, 2), (9, 4), (9, 4)):
        chosen = settings | {"training.max_steps": most}
        arguments = spoken("qwen2"), data_of("lora", data), str(output), chosen
        ranks.run(f"{HERE}:{entry}", *arguments, world=world)
        assert len(losses(output)) == reached
        status = read_status(output / "status.json")
        assert (status["state"], status["exit_code"]) == ("completed", 0)


@pytest.mark.parametrize(
    ("method", "strategy"),
    covering(product(METHODS, STRATEGIES)),
)
def test_curve_saved_files_and_their_use_are_those_of_one_process(
    ranks: Ranks,
    spoken: Spoken,
    data: Path,
    reference: Callable[[str], Reference],
    tmp_path: Path,
    method: str,
    strategy: str,
) -> None:
    alone, output = reference(method), tmp_path / "out"
    settings = METHODS[method] | STRATEGIES[strategy] | {"training.max_steps": STEPS}
    world = 4 if "-x-" in strategy else 2
    folder = spoken(FAMILIES[method])
    ends = ranks.run(
        f"{HERE}:together", folder, data_of(method, data), str(output), settings, world=world
    )
    assert ends == ["all steps are done"] * world
    curve, wanted = losses(output), losses(alone.output)
    assert len(curve) == len(wanted) == STEPS
    assert np.max(np.abs(np.array(curve) / wanted - 1)) < 1e-4

    mine, theirs = (
        {file.name: file for file in (folder / "checkpoints" / "latest").iterdir()}
        for folder in (output, alone.output)
    )
    assert mine.keys() == theirs.keys()
    for name in mine:
        if name.endswith(".json") and name not in ("run.json", "manifest.json"):
            assert mine[name].read_bytes() == theirs[name].read_bytes(), name
        if not name.endswith(".safetensors") or name == "optimizer.safetensors":
            continue
        found, right = load_file(mine[name]), load_file(theirs[name])
        assert found.keys() == right.keys()
        flat = [np.concatenate([part[k].ravel() for k in right]) for part in (found, right)]
        assert distance(*flat) < 1e-5
        # A few weights whose gradients are nearly zero, which AdamW divides by themselves.
        assert max(distance(found[k], right[k]) for k in right) < 1e-4

    if (right := alone.merged) is not None:
        found = merged_weights(output, tmp_path / "merged")
        base = load_file(Path(folder, "model.safetensors"))
        assert found.keys() == right.keys() >= base.keys()
        learned = [name for name in base if not np.array_equal(right[name], base[name])]
        assert learned
        for name in base:
            if name in learned:  # by the adapter's part alone, a small one of the weights
                assert distance(found[name] - base[name], right[name] - base[name]) < 1e-3, name
            else:
                assert np.array_equal(found[name], base[name]), name
    scores = ranks.run(f"{HERE}:evaluated", str(output), settings, world=world)
    assert scores == [pytest.approx(alone.score, rel=1e-5)] * world
    if alone.tokens is not None:
        assert ranks.run(f"{HERE}:continued", str(output)) == [alone.tokens] * 2


def test_a_run_resumes_under_another_strategy_and_alone(
    ranks: Ranks, spoken: Spoken, data: Path, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The first update after each change would show moments that were lost or misplaced."""
    folder, output = spoken(FAMILIES["full"]), tmp_path / "out"

    def settings(stop: int, strategy: str) -> dict[str, Any]:
        # The whole plan, of which a stop ends this part.
        steps = {"training.max_steps": STEPS, "checkpoint.every": 1000}
        return METHODS["full"] | STRATEGIES[strategy] | steps | {"stop": stop}

    arguments = folder, str(data), str(output)
    ranks.run(f"{HERE}:together_until", *arguments, settings(6, "fsdp"))
    ranks.run(f"{HERE}:together_until", *arguments, settings(12, "fsdp-x-tensor"), world=4)
    ranks.run(f"{HERE}:together_until", *arguments, settings(18, "tp-sp"))
    alone = METHODS["full"] | {"training.max_steps": STEPS}
    assert ranks.run(f"{HERE}:alone", *arguments, alone, world=1) == [0]
    curve, wanted = losses(output), losses(reference("full").output)
    assert len(curve) == STEPS
    assert np.max(np.abs(np.array(curve) / wanted - 1)) < 1e-4


def merged_weights(output: Path, folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of base and adapter as one model."""
    return load_file(merge_adapter(open_adapter(output)[0], folder) / "model.safetensors")


def distance(mine: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(mine - wanted) / np.linalg.norm(wanted))
