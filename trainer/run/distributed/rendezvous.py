"""Ranks meet while they read their data, and report how far they are, so that others wait.

The main thread reads. A thread of its own connects to the store in which ranks meet, and leaves
there what has been read, whether that has grown or not: the ranks that wait judge it, in
`gather_rank_reports`.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field
from torch._C._distributed_c10d import Store

from trainer.run.distributed.environment import Environment
from trainer.run.distributed.process_group import open_store
from trainer.run.distributed.rank_notes import read_note
from trainer.system.errors import UnreachableError
from trainer.system.process.native_thread import NativeThread, exit_from_any_thread
from trainer.system.storage.progress import latest_progress

log = logging.getLogger(__name__)

COUNT = "reading-count"
"""Key of all that all ranks have read since they met."""
GIVEN_UP = "reading-given-up"
"""Key of why the ranks that waited have ended."""
_INTERVAL = 0.5
"""Seconds between two reports."""
_LEAVES = 5.0
"""Seconds for ranks that read to learn that the others have ended."""
_Note = tuple[str, Annotated[str, Field(max_length=1000)]]
"""A rank's host, and how far it has read."""


class Rendezvous:
    """Meets the other ranks during the block, in which this rank reads its data.

    If the others give up waiting, the process ends: its main thread may hang in the reading.

    Args:
        patience: seconds to meet them, from the end of the block at the latest.
    """

    def __init__(self, environment: Environment, patience: float) -> None:
        self._environment, self._patience = environment, patience
        self._read = threading.Event()
        self._store: Store | None = None
        self._error: Exception | None = None
        self._thread = NativeThread(self._open_store_and_report, "meeting-ranks")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._read.set()

    def wait_for_store(self) -> Store:
        """Return the store, once the data is read.

        Raises:
            InputError: rank 0 cannot listen.
            UnreachableError: rank 0 does not answer, or has this rank already.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._store is not None
        return self._store

    def _open_store_and_report(self) -> None:
        try:
            self._store = self._open_store()
        except Exception as error:  # raised in the thread that waits
            self._error = error
            return
        with suppress(RuntimeError):  # without a store the main thread fails, and says so
            self._report_reading(self._store.clone())  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs

    def _open_store(self) -> Store:
        """Meet with the patience of a rank that has read its data, whenever others come."""
        while True:
            last = self._read.is_set()
            try:
                return open_store(self._environment, self._patience)
            except UnreachableError:
                if last:
                    raise

    def _report_reading(self, store: Store) -> None:
        rank, host, reported = self._environment.rank, socket.gethostname(), 0
        while not self._read.is_set():
            count, line = latest_progress()
            store.set(_reading_key(rank), json.dumps([host, line[:300]]))
            if count > reported:
                store.add(COUNT, count - reported)
                reported = count
            if store.check([GIVEN_UP]):
                reason = read_note(str, store.get(GIVEN_UP), GIVEN_UP)
                store.set(f"{_reading_key(rank)}-ended", "")
                log.error("rank %d failed while it read its data: %s", rank, reason)
                exit_from_any_thread(UnreachableError.exit_code)
            self._read.wait(_INTERVAL)


def end_reading_ranks(store: Store, missing: list[int], reason: str) -> str:
    """End the ranks that still read, and return `reason` with how far each of them has come."""
    reading = {rank: _reading_key(rank) for rank in missing if store.check([_reading_key(rank)])}
    for rank, key in reading.items():
        host, line = read_note(_Note, store.get(key), key)
        reason += f"; rank {rank} on {host} stalled at {line}"
    if reading:
        reason += ": check the disk, pipe or network folder that it reads"
        store.set(GIVEN_UP, json.dumps(reason[:1000]))
        with suppress(RuntimeError):  # a stopped one does not answer; rank 0 may hold the store
            store.wait([f"{key}-ended" for key in reading.values()], timedelta(seconds=_LEAVES))
    return reason


def _reading_key(rank: int) -> str:
    return f"reading-{rank}"
