"""Imports of large libraries without a search for garbage.

torch makes a million objects that stay. Python looks through them again and again while they are
made, and once more as it ends: a quarter of the CPU time of a process that only imports torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.system.process.announcement import announced


@contextmanager
def importing(*packages: str) -> Iterator[None]:
    """Import in the block what is not imported yet: `uncollected`, and announced if it is slow."""
    if all(package in sys.modules for package in packages):
        yield
        return
    with announced(f"importing {' and '.join(packages)}"), uncollected():
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the block; what it has made is never looked through afterwards.

    For imports at the start of a process: what is garbage by the end of the block stays for good.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
