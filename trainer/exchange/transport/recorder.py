"""What keeps the record of a run: the door from the exchange to disk and screen."""

from __future__ import annotations

from typing import Any, Protocol

from trainer.exchange.protocol.actions import Save, Step
from trainer.system.errors import TrainerError


class Recorder(Protocol):
    """Takes events and checkpoints; must not block the exchange."""

    def emit(self, event: dict[str, Any]) -> None:
        """Log an event."""
        ...

    def step(self, event: Step) -> None:
        """Log a step that was committed."""
        ...

    @property
    def failure(self) -> TrainerError | None:
        """Why the run must halt: what was to be kept is not kept."""
        ...

    @property
    def ending(self) -> str | None:
        """Why the run must stop in order, to hold its budget; asked several times a second."""
        ...

    def save(self, save: Save) -> None:
        """Write a checkpoint, later."""
        ...

    def close(self, exit_code: int, reason: str) -> int:
        """Wait for what is being written and return the exit code, worse if that failed."""
        ...
