"""The Task protocol: what a checkpoint is put to, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from trainer.checkpoint.trained_model import Trained
from trainer.config.run import Backend


@dataclass(frozen=True)
class Compute:
    """What a task may compute on; where it cannot, it falls back as training does."""

    backend: Backend = "auto"
    gpu: str = ""
    """An index, UUID, PCI address or name; empty for the first."""
    threads: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a task came to on one checkpoint."""

    figures: dict[str, float]
    rated_by: str | None = None
    """The figure that compares checkpoints, None where a task has none."""
    falling: bool = False
    """A smaller one is better."""
    samples: list[dict[str, Any]] | None = None
    """Texts for people to read."""

    @property
    def rating(self) -> float | None:
        """The figure to compare by, turned so that higher is better."""
        if self.rated_by is None:
            return None
        figure = self.figures[self.rated_by]
        return -figure if self.falling else figure

    def as_json(self) -> dict[str, Any]:
        """Return what a record holds of it."""
        tree: dict[str, Any] = {"figures": self.figures}
        return tree if self.samples is None else {**tree, "samples": self.samples}


class Task(Protocol):
    """One kind of evaluation."""

    @property
    def name(self) -> str:
        """Its name in records and on the command line."""
        ...

    def run(self, trained: Trained, compute: Compute) -> Outcome:
        """Evaluate a model.

        Raises:
            TrainerError: it cannot be evaluated so.
        """
        ...
