"""Freed arrays leave the process, also when glibc has seen large ones come and go."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np
from trainer.system.malloc import return_freed_arrays, return_freed_tensors

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024

{"with": return_freed_arrays, "of a replica": return_freed_tensors, "without": int}[sys.argv[1]]()
before = resident()
large = np.ones(6 << 20, np.float32)  # 24 MiB: glibc would raise its threshold to it
del large
arrays = [np.ones(1 << 20, np.float32) for _ in range(32)]  # 128 MiB
del arrays[:-1]  # the last one keeps the heap from shrinking
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
@pytest.mark.parametrize(
    ("how", "stays"), [("with", False), ("of a replica", False), ("without", True)]
)
def test_freed_arrays_leave_the_process(how: str, stays: bool):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True
    )
    assert (int(run.stdout) > 64) == stays, f"{run.stdout} MiB are still resident"
