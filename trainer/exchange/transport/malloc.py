"""malloc's heap: what is freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers of these parameters in glibc's <malloc.h>."""
_LARGE = 2 * 1024 * 1024
"""Bytes from which an array gets pages of its own. Payloads of frames stay below: fresh pages for
each of them, 2.5 microseconds a page, took as long as all sums."""
_SPARE = 4 * 1024 * 1024
"""Free bytes at the end of the heap that are kept for the next payloads."""


def return_freed_arrays() -> None:
    """Keep large arrays out of malloc's heap, on glibc; elsewhere do nothing.

    For the coordinator: glibc raises its threshold for separate pages to the largest array that was
    ever freed (up to 32 MiB). From then on contributions of all sizes come from one heap that
    fragments: 9.7 gradients of 24 MB were resident where 5.4 were in use. A threshold that is set
    stays.
    """
    if mallopt := _of_glibc("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _SPARE)


def return_free_pages() -> None:
    """Give all free pages of the heap back, also those between arrays in use; as above."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
