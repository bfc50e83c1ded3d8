"""Axes in the colours of the docs' pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GROUND, TEXT, GRID, FIRST, SECOND = "#292929", "#c5c8c6", "#4a4a4a", "#68a0b3", "#f0c674"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "motley",
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


@contextmanager
def picture(name: str, title: str) -> Iterator[Any]:
    """Yield axes that become docs/NAME.svg."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), facecolor=GROUND)
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        axes.set_facecolor(GROUND)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        figure.savefig(
            ROOT / "docs" / f"{name}.svg",
            format="svg",
            metadata={"Date": None, "Title": title},
        )
