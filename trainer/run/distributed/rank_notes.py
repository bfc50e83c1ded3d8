"""Notes that the ranks leave for each other, beside the process group.

Notes are exchanged through the rendezvous store, so they still arrive when a collective hangs, and
missing ranks can be named. A note is JSON; torch's own exchange of objects would unpickle received
data.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.system.errors import RefusedError, UnreachableError
from trainer.system.untrusted_data import validate_json

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25
_Note = TypeVar("_Note")


def read_note(kind: type[_Note], data: bytes, what: str) -> _Note:
    """Return a note of another rank, of a type.

    Raises:
        RefusedError: it is something else, or has values that are not plain.
    """
    try:
        return validate_json(kind, data, what, lines=True)
    except ValueError as error:
        raise RefusedError(f"invalid note of another rank: {error}") from None


class RankNotes:
    """The notes of one world; every rank calls the same methods in the same order.

    Args:
        store: waits are polled, so that threads may share its connection.
        patience: seconds to wait for another rank's note; may be lowered during a wait.
    """

    def __init__(self, store: Store, rank: int, world: int, *, patience: float) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self._store = store
        self._calls: Counter[str] = Counter()
        store.set(f"host/{rank}", socket.gethostname())

    def gather_notes(self, topic: str, note: Any) -> list[Any]:
        """Return every rank's note, in their order.

        Raises:
            UnreachableError: names the ranks whose note did not come in time.
        """
        keys = self._note_keys(topic)
        self._store.set(keys[self.rank], json.dumps(note))
        return self._read_notes(topic, keys)

    def broadcast_note(self, topic: str, note: Any = None) -> Any:
        """Return rank 0's note; the others' are ignored.

        Raises:
            UnreachableError: it did not come in time.
        """
        key = self._note_keys(topic)[0]
        if self.rank == 0:
            self._store.set(key, json.dumps(note))
            return note
        return self._read_notes(topic, [key])[0]

    def name_rank(self, rank: int) -> str:
        """Return `rank N on HOST`."""
        key = f"host/{rank}"
        host = self._store.get(key).decode() if self._store.check([key]) else "an unknown host"
        return f"rank {rank} on {host}"

    def name_ranks(self, ranks: list[int]) -> str:
        """Return several ranks with their hosts."""
        return ", ".join(map(self.name_rank, ranks))

    def _note_keys(self, topic: str) -> list[str]:
        self._calls[topic] += 1
        return [f"{topic}/{self._calls[topic]}/{rank}" for rank in range(self.world)]

    def _read_notes(self, topic: str, keys: list[str]) -> list[Any]:
        if late := self._wait_for_keys(keys):
            missing = [int(key.rpartition("/")[2]) for key in late]
            raise UnreachableError(
                f"{topic}: no answer from {self.name_ranks(missing)} within {self.patience:g} s"
            )
        return [read_note(object, self._store.get(key), key) for key in keys]

    def _wait_for_keys(self, keys: list[str]) -> list[str]:
        """Wait for keys of the store, and return those that are missing."""
        began, pause = time.monotonic(), _FIRST_PAUSE
        while not self._store.check(keys):
            if time.monotonic() - began >= self.patience:
                return [key for key in keys if not self._store.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []
