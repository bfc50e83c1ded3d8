"""The decision to end a run whose validation loss no longer falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Counts the validations since the one with the lowest loss."""

    patience: int | None
    """Validations without a lower loss that end a run; None: none do."""
    best: float | None = None
    best_step: int = 0
    behind: int = 0
    """Validations since."""
    step: int = -1
    """Of the last one."""

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from the `state` in a checkpoint."""
        for name, value in (state or {}).items():
            setattr(self, name, value)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: everything but the patience, which a resumed run may change."""
        return {name: value for name, value in vars(self).items() if name != "patience"}

    def validated(self, step: int, loss: float | None) -> None:
        """Count a validation; that of a step which was counted already, before a resume, is not."""
        if step <= self.step:
            return
        self.step = step
        if loss is not None and (self.best is None or loss < self.best):
            self.best, self.best_step, self.behind = loss, step, 0
        else:
            self.behind += 1

    @property
    def reason(self) -> str | None:
        """Why the run ends now; None: it goes on."""
        if self.patience is None or self.behind < self.patience:
            return None
        lowest = "" if self.best is None else f" below {self.best:.4f}, of step {self.best_step},"
        return f"early stopping: no validation loss{lowest} in {self.behind} validations"
