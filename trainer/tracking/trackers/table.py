"""The trackers that have packages of their own, each written in a thread, and the table of all.

No step waits for such a tracker, and its failure is reported once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.notifications import Tracker as Name
from trainer.config.run import RunConfig
from trainer.system.errors import InputError, first_line
from trainer.tracking.trackers.base import Tracker
from trainer.tracking.trackers.tensorboard_file import TENSORBOARD_FOLDER, TensorBoardFile

LAST = 15.0
"""Seconds that a run's end waits for a tracker to write the rest."""
_MOST_WAITING = 10_000
"""Records that wait for a tracker's thread."""
_TAG = "motley.run_id"
"""MLflow's tag of a run's id."""
_MOST = 1000
"""Figures that MLflow takes at once."""

log = logging.getLogger(__name__)
_Call = Callable[[Tracker], None]


class WandbRun(Tracker):
    """One run of a project in Weights & Biases, under Motley's run id.

    Offline below the output folder, and `wandb sync` uploads it later; online with WANDB_API_KEY,
    or by WANDB_MODE. Steps are a figure of their own, since wandb drops what comes after a later
    step, which a resumed run repeats.
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


class TrackioRun(Tracker):
    """One run of a project in trackio; one that resumes continues it."""

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


class MlflowRun(Tracker):
    """One run of an experiment in MLflow; one that resumes continues it."""

    def __init__(self, project: str, run_id: str, settings: dict[str, Any], output: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it reports to its makers
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports] - extra
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric: Any = Metric
        local = f"sqlite:///{output.absolute()}/mlflow.db"
        client: Any = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{run_id}'")
        self._client = client
        if runs:
            self._id = runs[0].info.run_id
            client.set_terminated(self._id, "RUNNING")
        else:
            self._id = client.create_run(
                experiment, run_name=run_id, tags={_TAG: run_id}
            ).info.run_id
            for begin in range(0, len(settings), 100):
                part = list(settings.items())[begin : begin + 100]
                client.log_batch(self._id, params=[Param(key, str(value)) for key, value in part])

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Record figures."""
        at = int(now * 1000)
        metrics = [self._metric(name, float(value), at, step) for name, value in values.items()]
        for begin in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST])

    def close(self, exit_code: int = 0) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


class Background(Tracker):
    """Opens a tracker in a thread, and passes on to it what it is told.

    A tracker that fails gets nothing more. One that is too slow loses what it is told while
    10,000 records wait.
    """

    def __init__(self, name: str, opens: Callable[[], Tracker]) -> None:
        self._name, self._opens = name, opens
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MOST_WAITING)
        self._lost = False
        self._thread = threading.Thread(target=self._run_calls, name=name, daemon=True)
        self._thread.start()

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Pass on figures."""
        self._put_call(lambda tracker: tracker.record_scalars(step, now, values))

    def record_text(self, step: int, now: float, tag: str, content: str) -> None:
        """Pass on a text."""
        self._put_call(lambda tracker: tracker.record_text(step, now, tag, content))

    def on_restart(self, step: int, now: float) -> None:
        """Pass on a restart."""
        self._put_call(lambda tracker: tracker.on_restart(step, now))

    def close(self, exit_code: int = 0, wait: float = LAST) -> None:
        """Let the tracker write the rest, a bounded time."""
        self._put_call(lambda tracker: tracker.close(exit_code))
        self._put_call(None)
        self._thread.join(wait)
        if self._thread.is_alive():
            self._report_once(
                f"not finished within {wait:.0f} s of the run's end; the rest is missing from it"
            )

    def _put_call(self, call: _Call | None) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._lost:
                self._report_once("is too slow; some metrics are missing")
            self._lost = True

    def _run_calls(self) -> None:
        try:
            tracker = self._opens()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception as error:  # another program's: whatever it raises, the run goes on
            self._report_once(f"{first_line(error)}; it receives no more data")

    def _report_once(self, what: str) -> None:
        log.warning("tracking %s: %s (metrics.jsonl has everything)", self._name, what)


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
            found.append(TensorBoardFile(output / TENSORBOARD_FOLDER, log.warning))
            continue
        opens = partial(
            TRACKERS[name].opens, config.name, run_id, config.flatten_settings(), output
        )
        found.append(Background(name, opens))
    return found
