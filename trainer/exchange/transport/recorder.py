"""The recorder of a run: the exchange's interface to disk and screen."""

from __future__ import annotations

from typing import Any, Protocol

from trainer.exchange.protocol.actions import Save, Step
from trainer.system.errors import TrainerError


class Recorder(Protocol):
    """Takes events and checkpoints; must not block the exchange."""

    def emit(self, event: dict[str, Any]) -> None:
        """Log an event."""
        ...

    def log_step(self, event: Step) -> None:
        """Log a step that was committed."""
        ...

    @property
    def failure(self) -> TrainerError | None:
        """The error for which the run must halt: a record or checkpoint cannot be written."""
        ...

    @property
    def ending(self) -> str | None:
        """The reason to stop in order, to stay within the budget; read several times a second."""
        ...

    def save(self, save: Save) -> None:
        """Write a checkpoint, later."""
        ...

    def close(self, exit_code: int, reason: str) -> int:
        """Wait for what is being written and return the exit code, worse if that failed."""
        ...
