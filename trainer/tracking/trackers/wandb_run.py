"""A run in Weights & Biases: offline below the output folder, or online if it has a key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.tracking.trackers.base import Tracker


class WandbRun(Tracker):
    """One run of a project, under Motley's run id; `wandb sync` uploads it later.

    Online with WANDB_API_KEY, or by WANDB_MODE. Steps are a figure of their own, since wandb drops
    what comes after a later step, which a resumed run repeats.
    """

    def __init__(self, project: str, run_id: str, settings: dict[str, Any], output: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it reports to its makers
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        online = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run: Any = wandb.init(
            project=project,
            name=run_id,
            id=run_id,
            dir=str(output),
            mode=os.environ.get("WANDB_MODE", online),  # pyright: ignore[reportArgumentType] - it checks it
            resume="allow",
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:  # noqa: ARG002 - as Tracker has it
        """Record figures."""
        self._run.log({"step": step, **values})

    def close(self, exit_code: int = 0) -> None:
        """Mark the run as finished or failed."""
        self._run.finish(exit_code=exit_code)
