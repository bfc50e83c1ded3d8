"""A line for a long operation: `importing torch ...`, after one second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds before the line."""


@contextmanager
def log_if_slow(operation: str, log_line: Callable[[str], None] = log.info) -> Iterator[None]:
    """Log `operation` once the block has taken longer than a second.

    It goes to the log, so to stderr, as a line: stdout is data, and units' logs have no carriage
    returns. `log_line` prints it for a program without a log.
    """
    timer = threading.Timer(PATIENCE, log_line, (f"{operation} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the caller may fork next, or pass stderr to a view
