"""The peak memory of a piece of work, on the CPU or a CUDA device."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import torch

from trainer.system.malloc import return_free_pages, return_freed_arrays


class PeakMemory:
    """The bytes above those at the start that were in use at once; None if unknown here.

    On the CPU it is the kernel's record of this process's resident pages, where it has one (Linux):
    it counts in pages, and sees what other threads take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        return_freed_arrays()
        return_free_pages()  # else what was freed stays resident, and counts as if it were in use
        try:
            # proc(5): 5 sets the peak back to what is resident now.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return self
        self._before = _resident("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _resident("VmHWM")
        self.bytes = peak - self._before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found[1])
