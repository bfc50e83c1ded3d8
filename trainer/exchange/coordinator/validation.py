"""The validations of a run: their schedule, checks of the results, the last scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.config.run import RunConfig
from trainer.exchange.coordinator.task import Task
from trainer.exchange.protocol.messages import ShardResult
from trainer.optimizer.early_stopping import EarlyStopping
from trainer.system.errors import ProtocolError

Score = Callable[[list[list[int]]], dict[str, float]]
"""Turns the confusion matrix of a validation into named figures."""

_SCORES = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
"""Figures that are scores of their own: accuracy decides which checkpoint is the best."""


class Validation:
    """The state of the validations on held-out samples."""

    def __init__(self, config: RunConfig, samples: int, score: Score, early: EarlyStopping) -> None:
        self.samples = range(samples)
        self._every = config.training.evaluate_every
        self._classes = config.num_classes
        self._measures = config.task in ("dpo", "script")
        self._score = score
        self._early = early
        self._last: tuple[int, dict[str, Any] | None] = (-1, None)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether the state after `step` updates has yet to be validated."""
        regular = self._every > 0 and step > 0 and step % self._every == 0
        return bool(self.samples) and (step == last_step or regular) and self._last[0] != step

    def check_result(self, result: ShardResult) -> None:
        """Refuse a result that does not fit the model's task.

        Raises:
            ProtocolError: its confusion matrix is missing, superfluous or of another size, or it
                has figures of another task.
        """
        table, classes = result.confusion, self._classes
        if table is None or classes is None:
            fits = table is None and classes is None
        else:
            fits = len(table) == classes and all(len(row) == classes for row in table)
        if not fits:
            raise ProtocolError(f"expected a confusion matrix of {classes} classes")
        if result.figures and not self._measures:
            raise ProtocolError("unexpected figures of pairs or a script")

    def finish_task(self, task: Task) -> dict[str, Any]:
        """Store and return the scores of a complete task."""
        scores: dict[str, Any] = {"loss": task.compute_loss()}
        if confusion := task.compute_confusion():
            scores |= {**self._score(confusion), "confusion": confusion}
        figures = task.compute_figures()
        scores |= {name: figures.pop(name) for name in _SCORES if name in figures}
        if figures:
            scores["figures"] = figures
        self._last = (task.step, scores)
        self._early.record_validation(task.step, scores["loss"])
        return scores

    def can_end_run(self, step: int, last_step: int) -> bool:
        """Return whether the validation after `step` updates may end the run."""
        return bool(self._early.patience) and self.is_due(step, last_step)

    @property
    def early_end(self) -> str | None:
        """The reason why the run ends before its last step; None: it goes on."""
        return self._early.stop_reason

    def find_scores(self, step: int) -> dict[str, Any] | None:
        """Return the scores of the state after `step` updates, if it was validated."""
        return self._last[1] if self._last[0] == step else None
