"""Wall clocks that can be wrong: a library (clock.c) that the trainers are started with.

libfaketime was tried: it makes `time.sleep` fail with EINVAL, whatever it is told of monotonic
clocks, and leaves shared memory behind when a process is killed.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_OFFSET = struct.Struct("=q")


class Clocks:
    """The clocks of some hosts, below a folder; raises ClockError without a C compiler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "clock.so"
        folder.mkdir()
        compiler = shutil.which("cc")
        if compiler is None:
            raise ClockError
        flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
        command = [compiler, *flags, "-o", self._library, _SOURCE, "-ldl"]
        if subprocess.run(command, capture_output=True).returncode != 0:
            raise ClockError

    def set(self, name: str, seconds: float) -> None:
        """Let a host's wall clock be wrong by some seconds; what runs there sees it at once."""
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, _OFFSET.pack(round(seconds)), 0)
        finally:
            os.close(descriptor)

    def environment(self, name: str) -> dict[str, str]:
        """Return what a process is started with to live by a host's clock."""
        return {"LD_PRELOAD": str(self._library), "SOAK_CLOCK": str(self._folder / name)}


class ClockError(Exception):
    """There is no C compiler, or it has no headers of the C library."""

    def __init__(self) -> None:
        super().__init__("no C compiler (apt install gcc libc6-dev)")
