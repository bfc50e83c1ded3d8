"""The Task protocol: one kind of evaluation of a checkpoint, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from trainer.checkpoint.trained_model import TrainedModel
from trainer.replica.backend import Compute


@dataclass(frozen=True)
class Outcome:
    """The result of a task on one checkpoint."""

    figures: dict[str, float]
    rated_by: str | None = None
    """The figure that ranks checkpoints, None if a task has none."""
    falling: bool = False
    """Whether smaller is better."""
    samples: list[dict[str, Any]] | None = None
    """Texts for people to read."""

    @property
    def rating(self) -> float | None:
        """The ranking figure, negated if smaller is better."""
        if self.rated_by is None:
            return None
        figure = self.figures[self.rated_by]
        return -figure if self.falling else figure

    def as_json(self) -> dict[str, Any]:
        """Return its part of a record."""
        tree: dict[str, Any] = {"figures": self.figures}
        return tree if self.samples is None else {**tree, "samples": self.samples}


class Task(Protocol):
    """One kind of evaluation."""

    @property
    def name(self) -> str:
        """Its name in records and on the command line."""
        ...

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        """Evaluate a model.

        Raises:
            TrainerError: it cannot be evaluated.
        """
        ...
