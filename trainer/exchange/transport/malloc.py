"""The coordinator's heap: what is large and freed goes back to the system at once."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers of these parameters in glibc's <malloc.h>."""
_LARGE = 2 * 1024 * 1024
"""Bytes from which an array gets pages of its own. Payloads of frames stay below: fresh pages for
each of them, 2.5 microseconds a page, took as long as all sums."""
_SPARE = 4 * 1024 * 1024
"""Free bytes at the end of the heap that are kept for the next payloads."""


def return_freed_arrays() -> None:
    """Keep large arrays out of malloc's heap, on glibc; elsewhere do nothing.

    glibc raises its threshold for separate pages to the largest array that was ever freed (up to
    32 MiB). From then on contributions of all sizes come from one heap that fragments: 9.7
    gradients of 24 MB were resident where 5.4 were in use. A threshold that is set stays.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _SPARE)
