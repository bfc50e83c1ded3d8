"""A lease: the right to write a folder, which one process at a time has, also on a share.

The folder of a lease is also the workspace of its holder: what the holder publishes is written in
there and renamed out of it. That is the fence. A process that takes over removes the workspaces of
all lower numbers before it reads anything. From then on its predecessor, wherever it was stopped or
cut off, cannot publish: what it would rename is gone, and there is no place to write it again. This
needs no check in the predecessor, so none can come too late.

On its own host the lock of a lease tells whether its holder lives, and a killed one is followed at
once. On other hosts signs of life do, a few seconds apart. Silence is measured by the observer's
own clock, so nothing depends on clocks that agree.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.errors import InUseError, StorageError
from trainer.storage.atomic_folder import prepare_folder
from trainer.storage.host_identity import host_identity
from trainer.storage.lease_folder import (
    Holder,
    claim,
    dissolve,
    is_locked,
    lease_path,
    mark_released,
    newest_lease,
    read_beat,
    read_holder,
    write_beat,
)

SILENCE = 30.0
"""Seconds without a sign of life after which another host may take over."""
_LOOK = 1.0
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)

log = logging.getLogger(__name__)


def leave(reason: str) -> None:
    """End this process here and now: what it still had to write is another one's business."""
    log.error("%s", reason)
    os._exit(InUseError.exit_code)


class Lease:
    """What one process holds on one folder; made by `take`."""

    def __init__(
        self,
        folder: Path,
        number: int,
        descriptor: int,
        on_lost: Callable[[str], None],
        silence: float,
    ) -> None:
        self.workspace = lease_path(folder, number)
        """A folder on the same file system, for what is not published yet."""
        self._folder, self._number, self._descriptor = folder, number, descriptor
        self._on_lost, self._silence = on_lost, silence
        self._beats, self._beaten_at = 0, _now()
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self, *, at_once: bool = False) -> None:
        """See that the lease is still this process's; costs nothing while signs of life arrive.

        To be called before anything is written that no rename out of the workspace protects, and
        `at_once` after such a rename failed. A folder that cannot be reached is no reason to end:
        it cannot be written either.
        """
        if at_once or _now() - self._beaten_at > self._silence / 2:
            self._beat()

    def release(self) -> None:
        """Give it back, for the next process to take at once."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            with suppress(OSError, ValueError):  # then the lock shows it, or the silence
                mark_released(self.workspace)
            os.close(self._descriptor)

    def _keep(self) -> None:
        while not self._over.wait(self._silence / 6):
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            began = _now()
            try:
                write_beat(self.workspace, self._beats + 1)
            except OSError as error:
                successor = self._successor() if error.errno in _GONE else None
                if successor is None:  # the folder is away, or was unmounted
                    return
                self._over.set()
            else:
                self._beats, self._beaten_at = self._beats + 1, began
                return
        self._on_lost(
            f"{self._folder}: taken over by {successor}; this process ends before it writes there"
        )

    def _successor(self) -> Holder | str | None:
        """Return the holder of a higher number."""
        try:
            newest = newest_lease(self._folder) or 0
        except OSError:
            return None
        if newest <= self._number:
            return None
        return read_holder(lease_path(self._folder, newest))[0] or "another process"


def take(
    folder: Path,
    run_id: str,
    *,
    on_lost: Callable[[str], None] = leave,
    silence: float = SILENCE,
) -> Lease:
    """Return the lease of a folder, which is made if need be; waits where its last holder may live.

    Args:
        on_lost: called once, from any thread, with the reason why nothing may be written any more.

    Raises:
        InUseError: a living process has it; names it.
        InputError: the folder cannot be made or written.
        StorageError: the disk failed.
    """
    prepare_folder(folder)
    try:
        while True:
            newest = newest_lease(folder)
            if newest is not None and not _is_free(folder, newest, silence):
                continue
            number = (newest or 0) + 1
            descriptor = claim(folder, number, run_id)
            if descriptor is not None:
                break
        for lower in range(1, number):
            dissolve(lease_path(folder, lower), folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be taken: {error.strerror or error}") from None
    return Lease(folder, number, descriptor, on_lost, silence)


def refuse_if_held(folder: Path) -> None:
    """See that no living process of this host has a folder, without touching it.

    Only `take` makes sure. This is for a command whose own preparations take long, or write.

    Raises:
        InUseError: a process has it; names it.
    """
    with suppress(OSError):  # there is no such folder yet, or its lease was just followed
        number = newest_lease(folder)
        if number is None:
            return
        path = lease_path(folder, number)
        holder, state = read_holder(path)
        if holder is None or state == "released" or holder.identity != host_identity():
            return
        if is_locked(path):
            raise _in_use(folder, holder)


def _is_free(folder: Path, number: int, silence: float) -> bool:
    """Whether a lease may be followed by the next; False when it changed and wants another look.

    Raises:
        InUseError: its holder lives.
    """
    path = lease_path(folder, number)
    try:
        holder, state = read_holder(path)
        if state == "released":
            return True
        if holder is not None and holder.identity == host_identity():
            locked = is_locked(path)
            if locked:
                raise _in_use(folder, holder)
            if locked is False:
                return True
        return _is_silent(folder, number, silence)
    except FileNotFoundError:  # it was followed and removed in between
        if newest_lease(folder) == number:
            raise
        return False


def _is_silent(folder: Path, number: int, silence: float) -> bool:
    """Listen for signs of life; only time counts in which the folder could be read."""
    path = lease_path(folder, number)
    holder, _ = read_holder(path)
    told = f"{holder or 'another process'} may still write here"
    log.info("%s: %s: listening for %g s", folder, told, silence)
    first, listened = read_beat(path), 0.0
    while listened < silence:
        before = _now()
        time.sleep(min(silence / 30, _LOOK))
        if newest_lease(folder) != number or read_holder(path)[1] == "released":
            return False
        if read_beat(path) != first:
            raise _in_use(folder, holder)
        # A machine that slept, or waited long for the share, has not listened.
        listened += min(_now() - before, silence / 10)
    return True


def _in_use(folder: Path, holder: Holder | None) -> InUseError:
    kill = f", or kill {holder.pid} there" if holder else ""
    return InUseError(
        f"{folder}: in use by {holder or 'another process'}; stop that one first (`launch cluster "
        f"down`{kill}), or choose another folder"
    )


def _now() -> float:
    """Return seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
