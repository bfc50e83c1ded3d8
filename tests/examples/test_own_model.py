"""The scripts of examples/own-model, which are documentation: they train, and are short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.script_run import run_script, script_config
from trainer.tracking.metrics import read_metrics

FOLDER = Path("examples/own-model")
LEAST = {"digits": ("accuracy", 0.95), "descriptions": ("found", 0.25), "reward": ("accuracy", 0.8)}
"""Of each script a figure of its validation; by chance it is 0.1, 0.0625 (of groups of 16), 0.5."""

ENOUGH = 400
"""Of so many packages, drawn at random five times, the towers found 0.31 to 0.46, of 250 0.12 to
0.38: a bare system has about 170."""


def count_packages() -> int:
    status = Path("/var/lib/dpkg/status")
    return status.read_text(encoding="utf-8").count("\nDescription: ") if status.exists() else 0


@pytest.mark.parametrize("name", LEAST)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    towers = name == "descriptions"
    if towers and not count_packages():
        pytest.skip("no Debian packages here")
    path = FOLDER / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    few = 2 if towers else 16
    settings = {
        "training__batch_size": few,
        "training__epochs": 20 if towers else 6,
        "training__micro_batch_size": few,
        "optimizer__learning_rate": 1e-2 if towers else 5e-3,
        "optimizer__max_grad_norm": 1.0,
    }
    assert run_script(path, script_config(tmp_path / "out", **settings)) == 0
    records = read_metrics(tmp_path / "out/metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert losses[-1] < losses[0] / 2
    if towers and count_packages() < ENOUGH:
        return  # too few to find the description of a name that was not seen
    figure, least = LEAST[name]
    found = [record for record in records if record["kind"] == "validation"][-1]
    assert (found.get("figures", {}) | found)[figure] > least
