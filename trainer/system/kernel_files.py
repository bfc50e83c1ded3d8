"""Small files of the kernel: sysfs, /proc and control groups. Standard library only."""

from __future__ import annotations

from pathlib import Path


def read_content(path: Path) -> str:
    """Return a file's text without its line end; empty when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the decimal or `0x` number in a file; None when there is none."""
    try:
        return int(read_content(path), 0)
    except ValueError:
        return None
