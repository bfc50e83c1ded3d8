"""A run in trackio: local in its own folder, or where its own variables say."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.tracking.trackers.base import Tracker


class TrackioRun(Tracker):
    """One run of a project; one that resumes continues it."""

    def __init__(self, project: str, run_id: str, settings: dict[str, Any], _: Path) -> None:
        import trackio  # pyright: ignore[reportMissingImports] - an extra

        with contextlib.redirect_stdout(sys.stderr):  # it prints where its data are
            self._run: Any = trackio.init(
                project,
                name=run_id,
                config=settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:  # noqa: ARG002 - as Tracker has it
        """Record figures."""
        self._run.log(dict(values), step=step)

    def close(self, exit_code: int = 0) -> None:  # noqa: ARG002 - as Tracker has it
        """Write what is not yet written."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
