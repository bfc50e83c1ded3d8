"""Pages that a script generates: written, or compared with what they should be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path


def update_pages(
    pages: Iterable[tuple[Path, str]], script: str, arguments: list[str] | None
) -> int:
    """Write the pages that differ from their text, or with `--check` name them.

    Returns:
        The exit status: 1 if `--check` has found one.
    """
    parser = argparse.ArgumentParser(prog=script)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    found = 0
    for page, text in pages:
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            print(f"{page}: out of date, run {script}", file=sys.stderr)
            found = 1
        else:
            page.write_text(text, encoding="utf-8")
    return found
