"""Tells a person of a run's events, by the command of the start (`config/notify_command.py`).

A thread runs the command, so that no step waits for it; the end of a run waits a bounded time.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from trainer.system.errors import RESTARTED, InputError, NonFiniteError, TrainerError, first_line
from trainer.system.process.child import SAVING_VARIABLE
from trainer.system.process.notification import plain_text, run_notify_command

NotifyEvent = Literal[
    "completed",
    "stopped",
    "failed",
    "nan",
    "budget",
    "stalled",
    "recovered",
    "lost",
    "rejoined",
    "resumed",
]
STALLED = 600.0
"""Seconds without a step after which a run makes no progress, or ten times the last step's."""
_STEPS = 10
LAST = 15.0
"""Seconds that a run's end waits for its notifications: a supervisor's grace is 20."""
_MOST_WAITING = 64
_WORDS: dict[NotifyEvent, str] = {
    "completed": "has completed",
    "stopped": "was stopped",
    "failed": "has failed",
    "nan": "was halted by NaN or Inf",
    "budget": "was stopped by its budget",
    "stalled": "makes no progress",
    "recovered": "makes progress again",
    "lost": "has lost a worker",
    "rejoined": "has recovered a worker",
    "resumed": "goes on",
}
_FACTS = ("step", "total_steps", "loss", "state", "exit_code", "budget")
"""Fields of the run's status that an event repeats."""

log = logging.getLogger(__name__)
_Waiting = tuple[NotifyEvent, dict[str, Any]] | None
"""An event; None asks the thread to end."""


class Notifier:
    """Runs a command for each event; without one it does nothing. Thread-safe.

    Args:
        output: the run's output folder, which events name.
        run: runs the command, reports each failed try, and returns why the last one failed.

    Raises:
        InputError: there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        run_id: str,
        output: str,
        *,
        stalled: float = STALLED,
        run: Callable[..., str | None] = run_notify_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if command and shutil.which(command[0]) is None:
            raise InputError(
                f"notify: program {command[0]} not found on {socket.gethostname()}; install it,"
                " give its absolute path, or --notify '' for none"
            )
        self._command = command
        self._run, self._clock = run, clock
        self._run_id, self._output = run_id, output
        self.status: Mapping[str, Any] = {}
        """The run's, once it is known."""
        self.failure: str | None = None
        """Why the command failed at the last event, also while it is tried again."""
        self._waiting: queue.Queue[_Waiting] = queue.Queue(_MOST_WAITING)
        self._progress_at: float | None = None
        self._patience = self._stalled_after = stalled
        self._is_stalled = self._ended = self._closed = False
        self._thread = threading.Thread(target=self._run_commands, name="notify", daemon=True)
        if command:
            self._thread.start()

    def notify(self, event: NotifyEvent, reason: str = "", **details: Any) -> None:
        """Tell of an event; returns at once. One too many for the command's pace is left out."""
        if not self._command:
            return
        facts = {key: self.status[key] for key in _FACTS if _is_known(self.status.get(key))}
        tree = {**facts, **details, "event": event, "run_id": self._run_id, "reason": reason}
        tree |= {"time": round(time.time(), 3), "output": self._output}
        tree |= {"host": socket.gethostname(), "text": _format_text(tree, _WORDS[event])}
        try:
            self._waiting.put_nowait((event, tree))
        except queue.Full:
            log.warning("notify: %s dropped: %d events are waiting", event, _MOST_WAITING)

    def record_progress(self, seconds: float = 0.0) -> None:
        """Note that a step, which took so long, or something else was completed."""
        self._progress_at = self._clock()
        self._patience = max(self._stalled_after, _STEPS * seconds)
        if self._is_stalled:
            self._is_stalled = False
            self.notify("recovered")

    def notify_end(
        self,
        event: Literal["completed", "stopped", "failed", "nan", "budget"],
        reason: str,
        exit_code: int,
    ) -> None:
        """Tell of the run's end; the first call counts.

        A failure after which a supervisor starts the run again is none: that supervisor tells if
        it gives up.
        """
        again = exit_code in RESTARTED and SAVING_VARIABLE in os.environ
        if not self._ended and not (event == "failed" and again):
            self.notify(event, reason, exit_code=exit_code)
        self._ended = True
        self._progress_at = None

    def close(self, wait: float = LAST) -> None:
        """Wait for the events that are under way, a bounded time; only the first call does."""
        if self._closed or not self._thread.is_alive():
            return
        self._closed = True
        try:
            self._waiting.put(None, timeout=wait)
            self._thread.join(wait)
        except queue.Full:
            pass
        if self._thread.is_alive():
            reason = self.failure or f"not finished within {wait:.0f} s"
            log.warning("notification failed: %s; the run ends without it", reason)

    def _run_commands(self) -> None:
        while True:
            try:
                found = self._waiting.get(timeout=self._until_stalled())
            except queue.Empty:
                self._look()
                continue
            if found is None:
                return
            event, tree = found
            if self._run(self._command, tree, report=partial(self._record_failure, event)) is None:
                self.failure = None
            elif not self._closed:
                log.warning("notification failed: %s; giving up", self.failure)

    def _record_failure(self, event: NotifyEvent, reason: str) -> None:
        """Keep why a try failed, and log it when that is new."""
        failure = f"{event}: {self._command[0]}: {reason}"
        if failure != self.failure:
            self.failure = failure
            log.warning("notification failed: %s; trying again", failure)

    def _until_stalled(self) -> float:
        """Return the seconds until the run counts as stalled, and at most those of a stall."""
        at = self._progress_at
        if at is None or self._is_stalled:
            return self._stalled_after
        return min(self._stalled_after, max(0.01, at + self._patience - self._clock()))

    def _look(self) -> None:
        at = self._progress_at
        if at is None or self._is_stalled or self._clock() - at < self._patience:
            return
        self._is_stalled = True
        since = self._clock() - at
        why = f": {self.status['reason']}" if self.status.get("reason") else ""
        self.notify(
            "stalled", f"no step was completed for {since:.0f} s{why}", seconds=round(since)
        )


@contextmanager
def notify_of_failure(notifier: Notifier) -> Iterator[None]:
    """Tell of an error of the block as the run's end, and wait for what is to be told."""
    try:
        yield
    except TrainerError as error:
        kind = "nan" if isinstance(error, NonFiniteError) else "failed"
        notifier.notify_end(kind, str(error), error.exit_code)
        raise
    except Exception as error:
        notifier.notify_end("failed", f"a defect: {first_line(error)}", 1)
        raise
    finally:
        notifier.close()


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _format_text(tree: Mapping[str, Any], words: str) -> str:
    """Return what a person reads: which run, what happened, where it is, and why."""
    at = f" at step {tree['step']} of {tree['total_steps']}" if tree.get("total_steps") else ""
    loss = f", loss {tree['loss']:.4g}" if isinstance(tree.get("loss"), float) else ""
    worker = f" ({tree['rank']} on {tree['worker_host']})" if "rank" in tree else ""
    why = f": {tree['reason']}" if tree["reason"] else ""
    return plain_text(f"{tree['run_id']} {words}{worker}{at}{loss}{why}")
