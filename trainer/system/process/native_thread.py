"""Threads that may hang in native code, and the end of a process beside one."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


class NativeThread(threading.Thread):
    """A daemon thread that may be in native code as the process ends; see `exit_process`."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def exit_process(code: int) -> NoReturn:
    """End the process, without the interpreter's own end if a native thread is left.

    One that returns from C++ while the interpreter ends aborts the process (SIGABRT) instead of
    the exit code, and torchrun and supervisors restart what was complete.
    """
    if any(isinstance(thread, NativeThread) for thread in threading.enumerate()):
        exit_from_any_thread(code)
    sys.exit(code)


def exit_from_any_thread(code: int) -> NoReturn:
    """End the process from any thread, whatever its main thread waits for."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone; it is closed
            stream.flush()
    os._exit(code)
