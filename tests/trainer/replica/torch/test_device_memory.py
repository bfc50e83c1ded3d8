"""Memory of a replica on the CPU that is short."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAPPED = """
import ctypes, torch
from trainer.replica.torch.device import spare_memory
class Blocks(ctypes.Structure):
    _fields_ = [(str(n), ctypes.c_size_t) for n in range(10)]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Blocks
mapped = lambda: getattr(mallinfo2(), "3")
spare_memory(torch.device("cpu"), 2**30, int(AVAILABLE * 2**30))
torch.zeros(4 * 2**20, dtype=torch.uint8)  # freed: glibc raises its own threshold to this
before = mapped()
kept = torch.zeros(2**20, dtype=torch.uint8)
print(mapped() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(("available", "blocks"), [(2.0, 0), (1.2, 1)])
def test_tensors_have_pages_of_their_own_if_memory_is_short(available: float, blocks: int) -> None:
    code = MAPPED.replace("AVAILABLE", str(available))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{blocks}\n"
