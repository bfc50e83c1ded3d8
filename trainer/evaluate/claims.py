"""Claims: exactly one runner scores a checkpoint, also on a share, and also if runners die.

Each checkpoint has a folder, named by its digest, whose lease is the claim. The result is written
in the lease's workspace and renamed out of it, so a runner that resumes after another one has taken
over cannot publish (`trainer.system.storage.lease`), and its result is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.evaluate.results import Record, parse_record
from trainer.system.errors import InUseError
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import write_atomically
from trainer.system.storage.jsonl import json_text
from trainer.system.storage.lease import LeaseListener, acquire_lease
from trainer.system.storage.lease_folder import Heartbeat, newest_heartbeat

RESULT = "result.json"


@dataclass(frozen=True)
class ClaimState:
    """The state of a checkpoint, from its folder."""

    sign: Heartbeat | None
    """The last sign of life of a runner; None without one."""
    record: Record | None = None
    """The result, if there is one."""


class Claims:
    """The claims in one folder, as one runner sees them.

    Args:
        timeout: seconds without a sign of life after which a claim may be taken over.
    """

    def __init__(
        self,
        folder: Path,
        runner: str,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._runner, self._timeout = folder, runner, timeout
        self._listener = LeaseListener(timeout, clock)
        self._states: dict[str, ClaimState] = {}

    def read_states(self) -> dict[str, ClaimState]:
        """Return the state of each checkpoint, by its digest.

        Raises:
            OSError: the folder cannot be read.
        """
        digests: list[str] = []
        try:
            digests = [path.name for path in self._folder.iterdir() if path.is_dir()]
        except FileNotFoundError:  # nothing has been claimed yet, or the share is away
            self._listener.reset()
        self._states = {digest: self._read_state(digest) for digest in digests}
        return self._states

    def take_claim(self, digest: str) -> Claim | None:
        """Return a claim that only this runner holds; None if there is a result, or it is taken.

        Call it now and then for one that is taken: silence counts between two calls alone, so an
        unreachable share or a suspended process does not make a live runner look dead.

        Raises:
            OSError: the output folder is unreachable.
            InputError: the claim cannot be written.
            StorageError: the disk failed, or is full.
        """
        folder = self._folder / digest
        for path in (self._folder.parent, self._folder, folder):
            with suppress(FileExistsError):
                path.mkdir()  # without its parents: the share may be unreachable
        try:
            claim = Claim(folder, self._runner, self._listener, self._timeout)
        except InUseError:
            return None
        if self._read_state(digest).record is None:
            return claim
        claim.release()  # its predecessor delivered it
        return None

    def _read_state(self, digest: str) -> ClaimState:
        known = self._states.get(digest)
        if known and known.record is not None:
            return known
        folder, record = self._folder / digest, None
        with suppress(FileNotFoundError, ValueError):  # a damaged one is replaced
            record = parse_record(read_file(folder / RESULT))
        return ClaimState(newest_heartbeat(folder), record)


class Claim:
    """One runner's claim, which shows signs of life until it is released.

    Raises:
        InUseError, InputError, StorageError: see `trainer.system.storage.lease.acquire_lease`.
    """

    def __init__(self, folder: Path, runner: str, listener: LeaseListener, timeout: float) -> None:
        self._folder, self._is_lost = folder, False
        self._lease = acquire_lease(
            folder, runner, listener=listener, on_lost=self._on_lost, silence=timeout
        )

    def deliver(self, record: Record) -> bool:
        """Publish the result; False if another runner has taken the claim over.

        Raises:
            OSError: the folder is unreachable, or the disk is full; may be tried again.
        """
        data = json_text(record).encode() + b"\n"
        try:
            write_atomically(self._folder / RESULT, data, None, workspace=self._lease.workspace)
        except OSError:
            self._lease.check_held(at_once=True)
            if not self._is_lost:
                raise
            return False
        return True

    def release(self) -> None:
        """Release it, so that others can take it at once."""
        self._lease.release()

    def _on_lost(self, _: str) -> None:
        self._is_lost = True
