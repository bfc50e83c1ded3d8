"""A lease: the right of one process at a time to write a folder, also a shared one.

The folder of a lease is also its holder's workspace: what the holder publishes is written there
and renamed out of it. This is the fence. A process that takes over removes the workspaces of all
lower numbers before it reads anything. From then on its predecessor, wherever it was stopped or
cut off, cannot publish: the source of its rename is gone, with the place to write it again. This
needs no check in the predecessor, so none can come too late.

On the same host the lock of a lease shows whether its holder lives, so a killed one is replaced at
once. On other hosts heartbeats do, a few seconds apart. Silence is measured by the observer's
own clock, so clocks need not agree.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.system.errors import InUseError, StorageError
from trainer.system.process.heartbeat import HeartbeatMonitor, start_heartbeat
from trainer.system.storage.atomic_folder import prepare_folder
from trainer.system.storage.host_identity import host_identity
from trainer.system.storage.lease_folder import (
    Heartbeat,
    Holder,
    clear_requests,
    create_lease,
    is_locked,
    lease_path,
    mark_released,
    newest_heartbeat,
    newest_lease,
    read_heartbeat,
    read_holder,
    remove_lease,
    write_heartbeat,
)

SILENCE = 30.0
"""Seconds without a heartbeat after which another host may take over."""
_LOOK = 1.0
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)

log = logging.getLogger(__name__)


def exit_on_lost_lease(reason: str) -> None:
    """Exit at once: another process writes the folder now."""
    log.error("%s", reason)
    os._exit(InUseError.exit_code)


class Lease:
    """One process's lease of one folder; made by `acquire_lease`."""

    def __init__(
        self,
        folder: Path,
        number: int,
        descriptor: int,
        on_lost: Callable[[str], None],
        silence: float,
        silent: Heartbeat | None,
    ) -> None:
        self.silent = silent
        """The heartbeat in the second folder during the whole silence of its predecessor."""
        self.workspace = lease_path(folder, number)
        """A folder on the same file system for unpublished files."""
        self._folder, self._number, self._descriptor = folder, number, descriptor
        self._on_lost, self._silence = on_lost, silence
        self._heartbeats, self._heartbeat_at = 0, _boot_clock()
        self._lock = threading.Lock()
        with self._lock:  # `_write_heartbeat` may come first
            self._over = start_heartbeat(self._write_heartbeat, silence / 6)

    def check_held(self, *, at_once: bool = False) -> None:
        """Check that this process still holds the lease; free while heartbeats are recent.

        Call it before every write that is not a rename out of the workspace, and with `at_once`
        after such a rename failed. An unreachable folder does not end the process: it cannot be
        written either.
        """
        if at_once or _boot_clock() - self._heartbeat_at > self._silence / 2:
            self._write_heartbeat()

    def release(self) -> None:
        """Release the lease, so that the next process can take it at once."""
        self._close(released=True)

    def abandon(self) -> None:
        """End it as a killed process would: the next one finds the lock free, or no heartbeat."""
        self._close(released=False)

    def _close(self, *, released: bool) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            if released:
                with suppress(OSError, ValueError):  # then the lock or the silence shows it
                    mark_released(self.workspace)
            os.close(self._descriptor)

    def _write_heartbeat(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            began = _boot_clock()
            try:
                write_heartbeat(self.workspace, self._heartbeats + 1)
            except OSError as error:
                successor = self._find_successor() if error.errno in _GONE else None
                if successor is None:  # the folder is unreachable or unmounted
                    return
                self._over.set()
            else:
                self._heartbeats, self._heartbeat_at = self._heartbeats + 1, began
                return
        self._on_lost(
            f"{self._folder}: taken over by {successor}; this process ends before it writes there"
        )

    def _find_successor(self) -> Holder | str | None:
        """Return the holder of a higher number."""
        try:
            newest = newest_lease(self._folder) or 0
        except OSError:
            return None
        if newest <= self._number:
            return None
        return read_holder(lease_path(self._folder, newest))[0] or "another process"


def acquire_lease(
    folder: Path,
    run_id: str,
    *,
    beside: Path | None = None,
    after: Lease | None = None,
    listener: LeaseListener | None = None,
    on_lost: Callable[[str], None] = exit_on_lost_lease,
    silence: float = SILENCE,
) -> Lease:
    """Return a folder's lease, creating the folder; waits if its last holder may be alive.

    Args:
        beside: a second folder of that holder, listened to meanwhile: one silence counts for both.
        after: the lease that was taken first, with this folder beside it.
        listener: has listened already, so that nothing waits.
        on_lost: called once, from any thread, with the reason if the lease is lost.

    Raises:
        InUseError: a living process holds it; names the process.
        InputError: the folder cannot be made or written.
        StorageError: the disk failed.
    """
    prepare_folder(folder)
    watch = _HolderWatch(folder, beside, silence, after.silent if after else None, listener)
    try:
        while True:
            newest = newest_lease(folder)
            if newest is not None and not watch.is_free(newest):
                continue
            number = (newest or 0) + 1
            descriptor = create_lease(folder, number, run_id)
            if descriptor is not None:
                break
        for lower in range(1, number):
            remove_lease(lease_path(folder, lower), folder)
        clear_requests(folder, lease_path(folder, number))
    except OSError as error:
        raise StorageError(f"{folder}: cannot be taken: {error.strerror or error}") from None
    return Lease(folder, number, descriptor, on_lost, silence, watch.silent)


def refuse_if_held(folder: Path) -> None:
    """Check that no living process of this host holds a folder, without changing it.

    Only `acquire_lease` is certain. This is for commands that prepare for long, or write, before.

    Raises:
        InUseError: a process holds it; names the process.
    """
    with suppress(OSError):  # no such folder yet, or its lease was just taken over
        number = newest_lease(folder)
        if number is None:
            return
        path = lease_path(folder, number)
        holder, state = read_holder(path)
        if holder is None or state == "released" or holder.identity != host_identity():
            return
        if is_locked(path):
            raise _in_use_error(folder, holder)


class LeaseListener:
    """Listens to leases now and then, and knows whose holders have been silent for long enough.

    One that is stopped on this host may be taken over as one of another host: it cannot publish.

    Args:
        silence: seconds, of which only those count between two calls that are not far apart.
    """

    def __init__(
        self, silence: float = SILENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence = silence
        self._monitors = defaultdict[Path, HeartbeatMonitor](
            lambda: HeartbeatMonitor(clock, longest=silence / 2)
        )

    def is_silent(self, folder: Path) -> bool:
        """Return whether the holder of a folder's lease is silent; not if it released it."""
        heartbeat = newest_heartbeat(folder)
        if heartbeat is None or read_holder(lease_path(folder, heartbeat[1]))[1] == "released":
            self._monitors.pop(folder, None)
            return False
        return self._monitors[folder].observe(heartbeat) >= self._silence

    def reset(self) -> None:
        """Forget all holders: the folders were out of reach, so that none could be observed."""
        self._monitors.clear()


class _HolderWatch:
    """Finds out whether the holder of a folder's lease lives, and listens beside it."""

    def __init__(
        self,
        folder: Path,
        beside: Path | None,
        silence: float,
        known: Heartbeat | None,
        listener: LeaseListener | None,
    ) -> None:
        self._folder, self._beside, self._silence = folder, beside, silence
        self._known, self._listener = known, listener
        self.silent: Heartbeat | None = None

    def is_free(self, number: int) -> bool:
        """Return whether a lease may be taken over; False if it changed and must be checked again.

        Raises:
            InUseError: its holder lives.
        """
        folder = self._folder
        path = lease_path(folder, number)
        try:
            holder, state = read_holder(path)
            if state == "released" or (self._listener and self._listener.is_silent(folder)):
                return True
            if holder is not None and holder.identity == host_identity():
                locked = is_locked(path)
                if locked:
                    raise _in_use_error(folder, holder)
                if locked is False:
                    return True
            if self._listener:
                raise _in_use_error(folder, holder)
            if self._known is not None and newest_heartbeat(folder) == self._known:
                return True
            return self._is_silent(number)
        except FileNotFoundError:  # taken over and removed meanwhile
            if newest_lease(folder) == number:
                raise
            return False

    def _is_silent(self, number: int) -> bool:
        """Return whether no heartbeat comes; only time in which the folder was readable counts."""
        folder, silence = self._folder, self._silence
        path = lease_path(folder, number)
        holder, _ = read_holder(path)
        name = holder or "another process"
        log.info("%s: %s may still write: waiting %g s for its heartbeat", folder, name, silence)
        first, beside = read_heartbeat(path), newest_heartbeat(self._beside)
        # In a sixth of it a living holder writes a heartbeat.
        monitor = HeartbeatMonitor(_boot_clock, longest=silence / 6)
        while monitor.observe(first) < silence:
            time.sleep(min(silence / 30, _LOOK))
            if newest_lease(folder) != number or read_holder(path)[1] == "released":
                return False
            if read_heartbeat(path) != first:
                raise _in_use_error(folder, holder)
            if beside is not None and newest_heartbeat(self._beside) != beside:
                beside = None
        self.silent = beside
        return True


def _in_use_error(folder: Path, holder: Holder | None) -> InUseError:
    kill = f", or kill {holder.pid} there" if holder else ""
    return InUseError(
        f"{folder}: in use by {holder or 'another process'}; stop that one first (`launch cluster "
        f"down`{kill}), or choose another folder"
    )


def _boot_clock() -> float:
    """Return seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
