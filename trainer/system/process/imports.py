"""Imports of large libraries without a search for garbage.

torch makes a million objects that stay. Python looks through them again and again while they are
made, and once more as it ends: a quarter of the CPU time of a process that only imports torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.system.process.slow_log import log_if_slow


@contextmanager
def speed_up_imports(*packages: str) -> Iterator[None]:
    """Import packages in the block without garbage collection; log a line if it is slow."""
    if all(package in sys.modules for package in packages):
        yield
        return
    with log_if_slow(f"importing {' and '.join(packages)}"), pause_gc():
        yield


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause garbage collection in the block, and exempt its objects from later collections.

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
