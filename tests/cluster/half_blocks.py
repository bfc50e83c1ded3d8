"""Faults in the middle of a block: half of it has crossed the connection, half is still to come."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from trainer.exchange.protocol.wire import TENSOR_TYPES, Frame
from trainer.exchange.transport.link import Link


def fail(fault: str, link: Link | None) -> None:
    """Die, stop until SIGCONT, or lose the connection as if a cable broke."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stall":
        # To this thread: sent to the process, it may come when the second half has left.
        signal.raise_signal(signal.SIGSTOP)
    elif fault == "cut":
        assert link is not None
        assert link._socket is not None  # pyright: ignore[reportPrivateUsage]
        link._socket.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportPrivateUsage]


def halves(frames: Iterable[Frame], between: Callable[[], None]) -> Iterator[Frame]:
    """Yield each frame as two.

    A link draws the second when the socket took the first; `between` is called right before.
    """
    for frame in frames:
        if frame.type not in TENSOR_TYPES:
            yield frame
            continue
        middle = len(frame.payload) // 16 * 8
        yield replace(frame, payload=frame.payload[:middle])
        between()
        yield replace(frame, payload=frame.payload[middle:], offset=frame.offset + middle)
