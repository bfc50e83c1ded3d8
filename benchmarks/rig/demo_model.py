"""The demo's model and data, for benchmarks that train it in one process: `make demo` first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rig.report import skip
from trainer.config.run import load
from trainer.replica.base import Replica
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inputs import RunInputs, read_inputs

DEMO = Path(__file__).parents[2] / "demo"
SHARES = (0.4, 0.3, 0.2, 0.1)
"""Of a step's samples, by worker."""
EQUAL = (0.25,) * 4
"""The same for what knows equal workers alone."""


def require_demo(demo: Path) -> None:
    """Leave if the demo's pre-trained model is not there."""
    if not (demo / "pretrain" / "checkpoints" / "latest").exists():
        skip(f"{demo} has no model; make demo makes it")


def demo_inputs(demo: Path, steps: int, **changes: Any) -> RunInputs:
    """Return what the preset `quickstart` reads, for so many steps."""
    settings = {
        "model.path": str(demo / "pretrain" / "checkpoints" / "latest"),
        "data.train": str(demo / "data" / "train.jsonl"),
        "data.validation": str(demo / "data" / "validation.jsonl"),
        "training.max_steps": steps,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return read_inputs(load("quickstart", settings), "benchmark")


def open_demo(demo: Path, steps: int, **changes: Any) -> tuple[RunInputs, TorchReplica]:
    """Return the same and a replica in one thread."""
    inputs = demo_inputs(demo, steps, **changes)
    return inputs, TorchReplica(inputs.model_dir, inputs.config, inputs.layout, threads=1)


def shards(samples: int, shares: Sequence[float] = SHARES) -> list[tuple[int, int]]:
    """Return each worker's range of a step's samples."""
    ends = [round(samples * sum(shares[: index + 1])) for index in range(len(shares))]
    return list(zip([0, *ends], ends, strict=False))


def validate(inputs: RunInputs, replica: Replica) -> dict[str, float]:
    """Return loss and accuracy on the validation samples."""
    assert inputs.validation is not None
    score = replica.evaluate([inputs.validation[i] for i in range(len(inputs.validation))])
    assert score.confusion is not None
    right = sum(row[label] for label, row in enumerate(score.confusion))
    return {"loss": score.loss_sum / score.weight, "accuracy": right / score.weight}
