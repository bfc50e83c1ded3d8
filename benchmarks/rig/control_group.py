"""A control group of version 1 or 2 that limits the memory of a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_JOIN = """
import os, sys
with open(sys.argv[1], "w") as processes:
    processes.write(str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class NoControlGroupError(Exception):
    """This user cannot make a control group here."""


@contextmanager
def limit_memory(limit: int) -> Iterator[list[str]]:
    """Yield what to put before a command, whose process then has at most `limit` bytes.

    Raises:
        NoControlGroupError: this user cannot make a group here.
    """
    version_1 = (_ROOT / "memory").is_dir()
    folder = _ROOT / ("memory" if version_1 else "") / f"motley-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        raise NoControlGroupError(str(error)) from None
    try:
        yield [sys.executable, "-c", _JOIN, str(folder / "cgroup.procs")]
    finally:
        folder.rmdir()
