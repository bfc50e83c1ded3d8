"""A tracker in a thread of its own: no step waits for it, and its failure is said once."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from trainer.system.errors import first_line
from trainer.tracking.trackers.base import Tracker

LAST = 15.0
"""Seconds that a run's end waits for a tracker to write the rest."""
_MOST_WAITING = 10_000

log = logging.getLogger(__name__)
_Call = Callable[[Tracker], None]


class Background(Tracker):
    """Opens a tracker in a thread, and passes on to it what it is told.

    A tracker that fails gets nothing more. One that is too slow loses what it is told while
    10,000 records wait.
    """

    def __init__(self, name: str, opens: Callable[[], Tracker]) -> None:
        self._name, self._opens = name, opens
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MOST_WAITING)
        self._lost = False
        self._thread = threading.Thread(target=self._run_calls, name=name, daemon=True)
        self._thread.start()

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Pass on figures."""
        self._put_call(lambda tracker: tracker.record_scalars(step, now, values))

    def record_text(self, step: int, now: float, tag: str, content: str) -> None:
        """Pass on a text."""
        self._put_call(lambda tracker: tracker.record_text(step, now, tag, content))

    def on_restart(self, step: int, now: float) -> None:
        """Pass on a restart."""
        self._put_call(lambda tracker: tracker.on_restart(step, now))

    def close(self, exit_code: int = 0, wait: float = LAST) -> None:
        """Let the tracker write the rest, a bounded time."""
        self._put_call(lambda tracker: tracker.close(exit_code))
        self._put_call(None)
        self._thread.join(wait)
        if self._thread.is_alive():
            self._report_once(
                f"not done within {wait:.0f} s of the run's end; the rest is not in it"
            )

    def _put_call(self, call: _Call | None) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._lost:
                self._report_once("is too slow; it lacks some figures")
            self._lost = True

    def _run_calls(self) -> None:
        try:
            tracker = self._opens()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception as error:  # another program's: whatever it raises, the run goes on
            self._report_once(f"{first_line(error)}; it gets nothing more")

    def _report_once(self, what: str) -> None:
        log.warning("tracking %s: %s (metrics.jsonl has everything)", self._name, what)
