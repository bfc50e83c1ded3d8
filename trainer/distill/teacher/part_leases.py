"""The parts of a folder's shards, each held by one process at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.system.errors import InUseError, StorageError
from trainer.system.storage.lease import SILENCE, Lease, LeaseListener, acquire_lease

log = logging.getLogger(__name__)


class PartLeases:
    """The parts that a process holds: its own, and those of processes that died.

    A part of which nobody ever began is left to who will, and so is one that was released: its
    process was stopped in order. One that failed, or was done and did not stay, leaves its lease as
    a killed one does, so that another one answers the requests and questions that come for it.

    Args:
        folder: of the leases.
        index: this process's part, from 1.
        count: how many parts there are.
        silence: seconds without a sign of life after which a process is gone.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        count: int,
        silence: float = SILENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._index, self.count = folder, index, count
        self._silence = silence
        self._held = {index}
        self._listener = LeaseListener(silence, clock)

    def take_part(self, name: str) -> Lease:
        """Take this process's own part.

        Raises:
            InUseError: a living process holds it; names the process.
        """
        return acquire_lease(self._lease_path(self._index), name, silence=self._silence)

    def holds_shard(self, number: int) -> bool:
        """Whether a shard is of a part that this process holds."""
        return number % self.count + 1 in self._held

    def take_abandoned(self, name: str) -> Iterator[tuple[int, Lease]]:
        """Yield further parts with their leases; their processes were silent for long enough.

        Call it now and then: silence counts between two calls that are not far apart.
        """
        for part in range(1, self.count + 1):
            if part in self._held or not self._listener.is_silent(self._lease_path(part)):
                continue
            with suppress(InUseError, StorageError):  # it is back, or another one was faster
                lease = acquire_lease(
                    self._lease_path(part), name, listener=self._listener, silence=self._silence
                )
                self._held.add(part)
                yield part, lease

    def _lease_path(self, part: int) -> Path:
        return self._folder / f"part-{part}-of-{self.count}"
