"""The budget guard of a process that waits and computes in one thread; it runs in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.planning.budget.watch import BudgetWatch
from trainer.system.process.stop_signals import StopRequest

LOOK_EVERY = 1.0


class BudgetStopper:
    """Asks a process to stop when its budget requires it, whatever the process is doing."""

    def __init__(self, watch: BudgetWatch | None, stop: StopRequest) -> None:
        self.watch, self.stop = watch, stop
        self.ending: str | None = None
        """Why it was asked to."""
        self._over = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Look now, and about once a second in the block; without a budget do nothing."""
        self._check_budget()
        thread = threading.Thread(target=self._watch_budget, name="budget", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch_budget(self) -> None:
        while self.watch is not None and self.ending is None and not self._over.wait(LOOK_EVERY):
            self._check_budget()

    def _check_budget(self) -> None:
        self.ending = self.watch and self.watch.ending
        if self.ending is not None:
            self.stop.request(self.ending)
