"""WGSL files beside this module, with the shared pieces that they use."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_USE = re.compile(r"^//!use (\w+)$", re.MULTILINE)


@cache
def read_kernel_source(name: str) -> str:
    """Return the code of `name.wgsl`; each line `//!use piece` becomes `piece.wgsl`."""
    code = (_FOLDER / f"{name}.wgsl").read_text(encoding="utf-8")
    return _USE.sub(lambda match: read_kernel_source(match.group(1)), code)
