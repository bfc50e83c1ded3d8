"""A cache that another process fills: a reader of large data waits for it."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_INTERVAL = 0.2


class HeldCache:
    """Holds the lock of a cache, as a process does that makes an entry.

    Args:
        grows: some bytes are written all the time; else that process hangs.
    """

    def __init__(self, folder: Path, *, grows: bool) -> None:
        self.folder, self._grows = folder, grows
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        entry = self.folder / ".tmp-rows-elsewhere.0"
        entry.mkdir(parents=True)
        self._lock = (self.folder / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._file = (entry / "rows.arrow").open("wb", buffering=0)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._file.close()
        self._lock.close()

    def fill(self, other: Path) -> None:
        """Bring the entries of another cache, as if they were made here."""
        for entry in other.glob("rows-*"):
            shutil.copytree(entry, self.folder / entry.name)

    def _write(self) -> None:
        while not self._ended.wait(_INTERVAL):
            if self._grows:
                self._file.write(bytes(1 << 20))


def write_large(source: Path, target: Path, size: int) -> Path:
    """Write a data file again and again into one of at least so many bytes."""
    data = source.read_bytes()
    target.write_bytes(data * (size // len(data) + 1))
    return target
