"""Output streams that take any text, and one that ends early."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def print_any_text() -> None:
    """Escape what the terminal's encoding lacks, instead of failing: `LC_ALL=C` is ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def end_output() -> None:
    """Drop what stdout could not take: nothing more can be printed, not even at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
