"""The peak memory of a piece of work, on the CPU or a CUDA device."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import TracebackType

import torch

_M_MMAP_THRESHOLD = -3
_THRESHOLD = 64 * 1024


class PeakMemory:
    """The bytes above those at the start that were in use at once; None if unknown here.

    On the CPU it is the kernel's record of this process's resident pages (Linux), which counts in
    pages and sees what other threads take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif sys.platform.startswith("linux"):
            # Tensors get pages of their own, so that what is freed is not counted again.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
            # proc(5): 5 sets the peak back to what is resident now.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._before = _resident("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif sys.platform.startswith("linux"):
            self.bytes = _resident("VmHWM") - self._before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found[1])
