"""The one table of trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.notifications import Tracker as Name
from trainer.config.run import RunConfig
from trainer.system.errors import InputError
from trainer.tracking.trackers.background import Background
from trainer.tracking.trackers.base import Tracker
from trainer.tracking.trackers.mlflow_run import MlflowRun
from trainer.tracking.trackers.tensorboard_file import TENSORBOARD_FOLDER, TensorBoardFile
from trainer.tracking.trackers.trackio_run import TrackioRun
from trainer.tracking.trackers.wandb_run import WandbRun

logger = logging.getLogger(__name__)


class _Row(NamedTuple):
    """How a tracker is opened, and what it needs."""

    opens: Callable[[str, str, dict[str, Any], Path], Tracker]
    """For project, run id, settings and output folder; imports its packages, and may raise
    whatever it likes."""
    packages: tuple[str, ...]


TRACKERS: dict[Name, _Row] = {
    "trackio": _Row(TrackioRun, ("trackio",)),
    "wandb": _Row(WandbRun, ("wandb",)),
    "mlflow": _Row(MlflowRun, ("mlflow", "sqlalchemy", "alembic")),
}
"""All but TensorBoard, whose package the coordinator has, and which needs no thread. The extra that
brings a tracker's packages has its name."""


def check_trackers(names: Sequence[Name]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        InputError: one is not; names the extra.
    """
    for name in names:
        packages = TRACKERS[name].packages if name in TRACKERS else ()
        if missing := [package for package in packages if find_spec(package) is None]:
            raise InputError(
                f"tracking: {name} needs the package {missing[0]} on the coordinator's host;"
                f" install the extra: pip install 'motley[{name}]'"
            )


def open_trackers(config: RunConfig, run_id: str, output: Path) -> list[Tracker]:
    """Return the trackers of a run's settings."""
    found: list[Tracker] = []
    for name in dict.fromkeys(config.tracking):
        if name == "tensorboard":
            found.append(TensorBoardFile(output / TENSORBOARD_FOLDER, logger.warning))
            continue
        opens = partial(
            TRACKERS[name].opens, config.name, run_id, config.flatten_settings(), output
        )
        found.append(Background(name, opens))
    return found
