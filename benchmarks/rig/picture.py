"""Pictures of the docs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.compare import picture as drawing

ROOT = Path(__file__).parents[2]


@contextmanager
def picture(name: str, title: str) -> Iterator[Any]:
    """Yield axes that become docs/NAME.svg."""
    with drawing.picture(ROOT / "docs" / f"{name}.svg", title) as axes:
        yield axes
