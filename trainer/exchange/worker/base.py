"""The Exchange protocol: a worker loop's interface to the other members."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol.messages import Message, ShardAssignment
from trainer.exchange.worker.session import Event


class Exchange(Protocol):
    """Gives a loop its work and takes its results."""

    def next_event(self) -> Event | None:
        """Wait for the next event; None after an `interrupt`.

        Raises:
            RefusedError: the coordinator does not let this worker in.
            UnreachableError: the coordinator did not answer for too long.
        """
        ...

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: NDArray[np.float32], weight: int
    ) -> None:
        """Send a block's gradient sum over the shard.

        The array is the exchange's, to change too, until the next shard is computed.
        """
        ...

    def send(self, message: Message, step: int) -> None:
        """Send a result or a report."""
        ...

    def interrupt(self, reason: str) -> None:
        """Ask the run, or this worker's part of it, to end in order; safe in a signal handler."""
        ...

    def close(self, reason: str) -> None:
        """Leave the run and release everything."""
        ...
