"""The output folder of a run that never was: its metrics and its state."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.tracking.status import first_status


def write_metrics(folder: Path, steps: int) -> None:
    """Write the metrics of so many steps of three workers."""
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(steps):
            first = 24 * number
            line = {
                "kind": "step",
                "time": 1.8e9 + number / 7,
                "step": number + 1,
                "epoch": 0,
                "loss": 2.0 / (1 + number / 7),
                "learning_rate": 1e-4 / (1 + number / 7),
                "tokens_per_second": 1e4 / 7 + number % 13,
                "seconds": 0.5 / 7,
                "exchange_ms": 30 / 7,
                "exchange_exposed_ms": 10 / 7,
                "worker_samples": {"0": 8, "1": 8, "2": 8},
                "worker_seconds": {"0": 3 / 7, "1": 4 / 7, "2": 5 / 7},
                "worker_overlap_seconds": {"0": 1 / 7, "1": 1 / 7, "2": 1 / 7},
                "sample_ranges": [
                    [rank, first + 8 * rank, first + 8 * rank + 8] for rank in range(3)
                ],
            }
            file.write(json.dumps(line) + "\n")


def write_output(folder: Path, run_id: str, steps: int) -> None:
    """Write an output folder of so many steps, as `launch report` reads it."""
    folder.mkdir(parents=True)
    write_metrics(folder, steps)
    state = {**first_status(run_id, steps, 3), "state": "completed", "step": steps}
    (folder / "status.json").write_text(json.dumps(state))
