"""Single keys of a terminal, without Enter; Ctrl-C keeps its meaning."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Generator


@contextlib.contextmanager
def read_keys() -> Generator[Callable[[float], str]]:
    """Yield what waits so many seconds for a key: `""` for none.

    Without a terminal on stdin, or in the background, it only waits.
    """
    import termios
    import tty

    descriptor = -1
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        before = None
    if before is None or _is_behind(descriptor):
        yield _wait
        return

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        pressed = os.read(descriptor, 1) if ready else b""
        if ready and not pressed:  # end of file: the terminal was closed
            time.sleep(seconds)
        return pressed.decode(errors="replace")

    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _is_behind(descriptor: int) -> bool:
    """Whether this is a background job, which is stopped when it changes the terminal."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # not our controlling terminal: job control does not apply
        return False


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
