"""The coordinator's heap: what is freed goes back to the system at once."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
"""The number of this parameter in glibc's <malloc.h>."""
_THRESHOLD = 256 * 1024
"""Bytes from which an array gets pages of its own: below all blocks that matter for memory."""


def return_freed_arrays() -> None:
    """Keep arrays out of malloc's heap, on glibc; elsewhere do nothing.

    glibc raises its threshold for separate pages to the largest array that was ever freed (up to
    32 MiB). From then on contributions of all sizes come from one heap that fragments: 9.7
    gradients of 24 MB were resident where 5.4 were in use. A threshold that is set stays.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
