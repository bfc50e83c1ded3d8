"""The resident memory of this process, and its highest value for a while."""

from __future__ import annotations

import threading
from pathlib import Path

EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""For a process to measure: large blocks go back to the kernel when they are freed."""


def own_bytes() -> int:
    """Return this process's resident bytes; frozen weights may be pages of their file."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


class Peak:
    """The highest `own_bytes` while it is entered."""

    def __enter__(self) -> Peak:
        """Start to watch."""
        self.bytes = own_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, own_bytes())
