"""The cache: what Motley derives from a model, made once for each content. Safe to empty.

An entry is a folder with a manifest below the cache's root, `MOTLEY_CACHE`, else `motley` in
`XDG_CACHE_HOME`. It appears whole or not at all, and its user holds it until the process ends.
When a new entry takes the cache above its limit, those that were used least recently are removed,
but never one in use.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.system.errors import InputError, StorageError
from trainer.system.process.slow_log import log_if_slow
from trainer.system.storage.atomic_folder import Disk, read_manifest, verify_folder
from trainer.system.storage.new_folder import write_new
from trainer.system.storage.progress import report_progress
from trainer.system.storage.removal import pin_folder, remove_folder, sweep_leftovers

GIB = 1024**3
DEFAULT_LIMIT = 64 * GIB

Files = Mapping[str, Iterable[bytes | memoryview]]
"""The pieces of each file of a new entry, by name."""

_DIGITS = 16
_LOOK = 0.1
"""Seconds between two looks whether another process still fills the cache."""
_ENTRY = re.compile(rf".+-[0-9a-f]{{{_DIGITS}}}")
"""The name of an entry: beside entries a user may have models of their own."""
_HELD = ExitStack()  # never closed: an entry in use is held until the process ends
_PINNED: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """One entry of the cache."""

    path: Path
    size: int
    """Bytes."""
    used: float
    """When it was used last, as `time.time()`."""


def cache_root() -> Path:
    """Return the folder of the cache, which need not exist."""
    if given := os.environ.get("MOTLEY_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "motley"


def cache_limit() -> int:
    """Return how many bytes the cache may keep.

    Raises:
        InputError: MOTLEY_CACHE_GIB is not a number of GiB.
    """
    given = os.environ.get("MOTLEY_CACHE_GIB")
    if given is None:
        return DEFAULT_LIMIT
    try:
        limit = float(given)
        if not 0 <= limit < 1e9:
            raise ValueError
    except ValueError:
        raise InputError(f"MOTLEY_CACHE_GIB {given!r}: give the limit in GiB, such as 64") from None
    return int(limit * GIB)


def ensure_entry(name: str, digest: str, make: Callable[[], Files]) -> Path:
    """Return the folder of an entry, intact and held until this process ends.

    Args:
        name: what a person reads.
        digest: in hex, of all that the content depends on.
        make: returns the files of a missing entry; one process at a time calls it.

    Raises:
        StorageError: the cache cannot be written; nothing is left of the entry.
    """
    limit, root = cache_limit(), cache_root()
    path = root / f"{name}-{digest[:_DIGITS]}"
    if (path in _PINNED and _has_sizes(path)) or _pin_entry(path):
        return path
    with _lock_cache(root):
        if _pin_entry(path):  # another process made it meanwhile
            return path
        sweep_leftovers(Disk(), root)
        write_new(path, make())
        if not _pin_entry(path):
            raise StorageError(f"{path}: was removed while it was made")
        _evict_entries(root, limit)
    return path


def damage_remedy(path: Path) -> str:
    """Return what to do about a damaged file, which an entry of this process may have."""
    is_cached = path.parent in _PINNED
    return "start again: the cache is rebuilt" if is_cached else "download or copy it again"


def list_entries() -> list[Entry]:
    """Return the entries of the cache, the last used first.

    Raises:
        StorageError: the cache is a file, or cannot be read.
    """
    root, found = cache_root(), list[Entry]()
    try:
        paths = list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable_error(root, error) from None
    for path in (path for path in paths if _ENTRY.fullmatch(path.name)):
        with suppress(OSError, StorageError):
            size = sum(record.size for record in read_manifest(path).values())
            found.append(Entry(path, size, path.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def clear_cache() -> list[Entry]:
    """Remove all entries; return those that stay because a process uses them.

    Raises:
        StorageError: an entry cannot be removed.
    """
    if not list_entries():
        return []
    root = cache_root()
    with _lock_cache(root):
        sweep_leftovers(Disk(), root)
        return [entry for entry in list_entries() if not _remove_entry(entry)]


def _pin_entry(path: Path) -> bool:
    """Pin an entry until this process ends and note its use; False if it is missing or damaged."""
    with ExitStack() as until_held:
        try:
            until_held.enter_context(pin_folder(path))
            verify_folder(path)
        except StorageError:
            return False
        _HELD.push(until_held.pop_all())
    _PINNED.add(path)
    with suppress(OSError):  # another user's cache, read-only
        os.utime(path)
    return True


def _has_sizes(path: Path) -> bool:
    """Return whether the files of an entry that was intact have their sizes."""
    try:
        read_manifest(path)
    except StorageError:
        return False
    return True


def _evict_entries(root: Path, limit: int) -> None:
    """Remove entries that were used least recently until the rest is within the limit."""
    kept = list_entries()
    excess = sum(entry.size for entry in kept) - limit
    for entry in reversed(kept):
        if excess > 0 and entry.path.parent == root and _remove_entry(entry):
            excess -= entry.size


def _remove_entry(entry: Entry) -> bool:
    try:
        return remove_folder(Disk(), entry.path)
    except OSError as error:
        raise StorageError(f"{entry.path}: cannot be removed: {error.strerror}") from None


def _unusable_error(root: Path, error: OSError) -> StorageError:
    reason = "is a file" if root.is_file() else f"cannot be used: {error.strerror}"
    return StorageError(f"{root}: the cache {reason}; set MOTLEY_CACHE to a folder to write to")


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks has one writer
    return True


def _unfinished_bytes(root: Path) -> int:
    """Return the size of what another process has written of its entry: its progress."""
    size = 0
    with suppress(OSError):  # it is published at this moment
        for path in root.glob(".tmp-*/*"):
            size += path.stat().st_size
    return size


@contextmanager
def _lock_cache(root: Path) -> Iterator[None]:
    """Wait until no other process changes the cache, and keep it so."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable_error(root, error) from None
    try:
        what = f"waiting for another process that fills {root}"
        with log_if_slow(what), report_progress(what, unit="bytes") as progress:
            written = 0
            while not _try_lock(lock):
                size = _unfinished_bytes(root)
                if size > written:
                    progress.advance(size - written)
                written = size
                time.sleep(_LOOK)
        yield
    finally:
        with suppress(OSError):  # which a process forked meanwhile has, too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
