"""The decision to end a run whose validation loss no longer falls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ValidationHistory:
    """The validations so far, as a checkpoint stores them."""

    lowest: float | None = None
    lowest_step: int = 0
    behind: int = 0
    """Validations since the lowest loss."""
    step: int = -1
    """The step of the last validation."""


@dataclass
class EarlyStopping:
    """Counts the validations since the one with the lowest loss."""

    patience: int | None
    """Validations without a lower loss that end a run; None: none do."""
    counted: ValidationHistory = ValidationHistory()

    def record_validation(self, step: int, loss: float | None) -> None:
        """Count a validation; that of a step which was counted already, before a resume, is not."""
        before = self.counted
        if step <= before.step:
            return
        if loss is not None and (before.lowest is None or loss < before.lowest):
            self.counted = ValidationHistory(loss, step, 0, step)
        else:
            behind = before.behind + 1
            self.counted = ValidationHistory(before.lowest, before.lowest_step, behind, step)

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop now; None: the run continues."""
        counted = self.counted
        if self.patience is None or counted.behind < self.patience:
            return None
        found = counted.lowest
        lowest = "" if found is None else f" below {found:.4f}, of step {counted.lowest_step},"
        return f"early stopping: no validation loss{lowest} in {counted.behind} validations"
