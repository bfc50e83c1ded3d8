"""A run in MLflow: SQLite in the output folder, or the store of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.tracking.trackers.base import Tracker

_TAG = "motley.run_id"
_MOST = 1000
"""Figures that MLflow takes at once."""


class MlflowRun(Tracker):
    """One run of an experiment; one that resumes continues it."""

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
