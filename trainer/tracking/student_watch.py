"""The end of a teacher or an eval runner whose student has a budget: it ends with the student."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.planning.budget.budget_watch import LATEST_RETURN
from trainer.system.errors import StorageError
from trainer.system.process.heartbeat import HeartbeatMonitor
from trainer.system.process.interruption import Interruption
from trainer.system.storage.lease_folder import newest_heartbeat
from trainer.tracking.status import STATUS_FILE, read_status, says_over

_LOOK_EVERY = 2.0


class StudentWatch:
    """Says when a student is gone for good, by the folder that it writes.

    Its lease there shows that it lives. The next attempt of a student that is away for longer
    than `silence` does not count the time between, so no host may be at work in it.

    Args:
        folder: with the run's status.json and the student's lease: its checkpoints, or its output.
        unless_completed: do not end if all steps are done; the student has waited for this one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        unless_completed: bool = False,
        silence: float = LATEST_RETURN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._unless_completed = folder, unless_completed
        self._longest, self._silence = silence, HeartbeatMonitor(clock)

    @property
    def reason(self) -> str:
        """Why this process must end now; empty while it need not."""
        silent = self._silence.observe(newest_heartbeat(self._folder))
        status = self._folder / STATUS_FILE
        if says_over(status) and not (self._unless_completed and _is_completed(status)):
            return "the student's run is over"
        if silent >= self._longest:
            return f"no update of the student for {silent:.0f} s, while its budget is spent"
        return ""


@contextmanager
def ends_with_student(watch: StudentWatch, interruption: Interruption) -> Iterator[None]:
    """Interrupt the block as SIGTERM does once a watch has a reason; in the main thread."""
    left, lock = threading.Event(), threading.Lock()
    main = threading.get_ident()

    def look() -> None:
        while not left.wait(_LOOK_EVERY):
            if reason := watch.reason:
                with lock:  # after the block nothing handles the signal
                    if not left.is_set():
                        interruption.set_reason(reason)
                        signal.pthread_kill(main, signal.SIGTERM)
                return

    thread = threading.Thread(target=look, name="student", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with lock:
            left.set()


def _is_completed(path: Path) -> bool:
    with suppress(StorageError):
        return read_status(path).get("state") == "completed"
    return False
