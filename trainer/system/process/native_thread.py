"""Threads that may hang in native code, and the end of a process beside one."""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2


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


class ExitTimer:
    """Timers of the C library that end the process with a line; they need no lock of Python's.

    The first flushes a stream to stderr that holds the line, the second exits a second later.
    """

    def __init__(self, code: int, seconds: float) -> None:
        """Make the timers; the process ends with `code`."""
        libc: Any = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        self._stream = ctypes.c_void_p(libc.fdopen(2, b"w"))
        libc.setvbuf(self._stream, None, 0, 1 << 14)
        self._write, self._discard, self._set = libc.fputs, libc["__fpurge"], libc.timer_settime
        self._timers: list[tuple[ctypes.c_void_p, bytes]] = []
        for function, argument in ((libc.fflush, self._stream.value), (libc._exit, code)):
            timer, target = ctypes.c_void_p(), ctypes.cast(function, ctypes.c_void_p).value
            event = struct.pack("Pii2P32x", argument, 0, _SIGEV_THREAD, target, 0)
            libc.timer_create(_CLOCK_MONOTONIC, event, ctypes.byref(timer))
            whole = int(seconds) + len(self._timers)
            span = struct.pack("4l", 0, 0, whole, int(seconds % 1 * 1e9))
            self._timers.append((timer, span))

    def start(self, line: str) -> None:
        """End the process in time, unless `cancel` is called."""
        self._write(f"{line}\n".encode(), self._stream)
        for timer, span in self._timers:
            self._set(timer, 0, span, None)

    def cancel(self) -> None:
        """Let the process live on."""
        for timer, _ in self._timers:
            self._set(timer, 0, bytes(32), None)
        self._discard(self._stream)
