"""Axes in the colours of the docs' pictures; matplotlib is loaded only here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.system.errors import InputError

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


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn and written.

    Raises:
        InputError: matplotlib is missing, or the path is not an SVG file in a folder that exists.
    """
    if path.suffix != ".svg":
        raise InputError(f"{path}: a picture is an SVG file; give it a name that ends with .svg")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError(
            "a picture needs matplotlib: pip install 'motley[compare]', or leave --plot out"
        ) from None
    del mpl


@contextmanager
def picture(path: Path, title: str) -> Iterator[Any]:
    """Yield axes that become an SVG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), facecolor=GROUND)
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        axes.set_facecolor(GROUND)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        unfinished = path.with_suffix(".svg.tmp")
        figure.savefig(unfinished, format="svg", metadata={"Date": None, "Title": title})
        unfinished.replace(path)
