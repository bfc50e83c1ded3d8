"""The ReadingThread: reports what this process reads, beside the main thread that reads.

It reports whether the count has grown or not: whoever waits judges that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from trainer.exchange.protocol.messages import Heartbeat, ReadProgress
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.transport.event_loop import call_in_loop
from trainer.system.errors import TrainerError
from trainer.system.storage.progress import latest_progress

log = logging.getLogger(__name__)

INTERVAL = 0.5
"""Seconds between two reports."""
MAX_QUEUED = 100
"""Reports that a peer may leave unread."""


class ReadingThread(ABC):
    """Reports what this process reads, until the block ends.

    Args:
        rank: of the reports.
    """

    _longest_end: float | None = None
    """Seconds that the end of the block waits for the thread; None: until it has ended."""

    def __init__(self, name: str, rank: int | None) -> None:
        self._rank = rank
        self._host = " ".join(socket.gethostname().split())
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call_in_loop(self._loop, self._over.set)
        self._thread.join(self._longest_end)

    @abstractmethod
    async def _report_until_read(self) -> None:
        """Report until `_over` is set."""

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._report_until_read())
        except Exception as error:  # the others wait without it, if they wait long enough
            defect = not isinstance(error, TrainerError)
            log.warning("reading progress is no longer reported: %s", error, exc_info=defect)
        finally:
            self._loop.close()

    def _make_report(self) -> Frame:
        count, line = latest_progress()
        reading = ReadProgress(
            rank=self._rank, host=self._host, count=count, description=line[:300]
        )
        return Heartbeat(read_progress=reading).to_frame(0)

    async def _wait_until_read(self, seconds: float) -> None:
        """Wait, or until the data is read."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
