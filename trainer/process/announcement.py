"""A line for what takes long: `importing torch ...`, once it has taken more than a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds without a word."""


@contextmanager
def announced(what: str, say: Callable[[str], None] = log.info) -> Iterator[None]:
    """Log `what` once the block has taken longer than a second; a quick one logs nothing.

    It goes to the log, so to stderr, as a line: stdout is data, and logs of units have no
    carriage returns. `say` prints it for a program without a log.
    """
    timer = threading.Timer(PATIENCE, say, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the caller may fork next, or hand stderr to a view
