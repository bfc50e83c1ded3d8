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


_TENSOR = 128 * 1024
"""The same for a process that computes: nearly all activations of a model."""


def return_freed_tensors() -> None:
    """Keep a replica's tensors on the CPU out of the heap; as `return_freed_arrays`.

    Activations of all sizes live and die in another order in every step, so the heap keeps what
    has been freed between them: LoRA on a model of hidden 320 took 1.52 times what its plan
    counts, and with this threshold 0.99 times. But the kernel clears fresh pages for each tensor:
    a step of a model of 135M weights took 1.55 times as long.
    """
    _set_thresholds(_TENSOR, _TENSOR)


def return_freed_arrays() -> None:
    """Keep large arrays out of malloc's heap, on glibc; elsewhere do nothing.

    For the coordinator: glibc raises its threshold for separate pages to the largest array that was
    ever freed (up to 32 MiB). From then on contributions of all sizes come from one heap that
    fragments: 9.7 gradients of 24 MB were resident where 5.4 were in use. A threshold that is set
    stays.
    """
    _set_thresholds(_LARGE, _SPARE)


def _set_thresholds(large: int, spare: int) -> None:
    if mallopt := _find_glibc_function("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, large)
        mallopt(_M_TRIM_THRESHOLD, spare)


def return_free_pages() -> None:
    """Give all free pages of the heap back, also those between arrays in use; as above."""
    if trim := _find_glibc_function("malloc_trim"):
        trim(0)


def _find_glibc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
