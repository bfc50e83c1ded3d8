"""A run of a student in this process, and what it left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.run import RunConfig, load_config
from trainer.distill.student.inputs import FreshStudent
from trainer.run.composition.roles import Placement
from trainer.run.composition.student_role import run_student
from trainer.system.process.stop_signals import StopRequest
from trainer.tracking.metrics import read_metrics


class Course:
    """One run of a student, in its own output folder."""

    def __init__(self, folder: Path, model: Path, logits: Path, **settings: Any) -> None:
        self.output = folder
        self.settings: dict[str, Any] = {
            "output": str(folder),
            "model.path": str(model),
            "data.train": str(logits),
            "optimizer.learning_rate": 1e-2,
            "training.batch_size": 5,
            "training.epochs": 2,
            "checkpoint.every": 4,
        }
        self.settings |= {key.replace("__", "."): value for key, value in settings.items()}

    @property
    def config(self) -> RunConfig:
        return load_config("student", self.settings)

    def run(
        self,
        stop: StopRequest | None = None,
        timeout: float = 30.0,
        compiled: bool = False,
        fresh: FreshStudent | None = None,
    ) -> int:
        return run_student(
            self.config,
            "run",
            Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None),
            compiled=compiled,
            teacher_timeout=timeout,
            stop=StopRequest() if stop is None else stop,
            fresh=fresh,
        )

    def run_until(self, step: int) -> None:
        """Stop once a step was done, as a signal would."""
        stop = StopsAt(self.output, step)
        assert self.run(stop) == 0
        assert stop.reason

    def steps(self, key: str = "loss") -> list[Any]:
        records = read_metrics(self.output / "metrics.jsonl")
        return [record[key] for record in records if record["kind"] == "step"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        records = read_metrics(self.output / "metrics.jsonl")
        return [record for record in records if record.get("event") == kind]


class StopsAt(StopRequest):
    """Asks for an end when the metrics show a step."""

    def __init__(self, output: Path, step: int) -> None:
        super().__init__()
        self._metrics, self._step = output / "metrics.jsonl", step

    def __bool__(self) -> bool:
        if self._metrics.exists() and f'"step": {self._step},' in self._metrics.read_text():
            self.request("enough")
        return bool(self.reason)
