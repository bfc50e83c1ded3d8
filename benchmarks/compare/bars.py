"""The picture of a comparison: a bar for each sum, and a line at its limit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare.backends import BACKENDS
from benchmarks.compare.comparison import Comparison
from benchmarks.compare.picture import FIRST, SECOND, TEXT, picture


def draw(path: Path, found: Comparison) -> None:
    """Write the picture of what was measured as an SVG file."""
    rows = [row for row in found.rows if row.sum_milliseconds is not None]
    title = f"Sum of a gradient over {found.workers} workers, ms"
    with picture(path, title) as axes:
        names = [
            f"{BACKENDS[row.backend].title}, {row.megabytes:.1f} MB,"
            f" {'loopback' if row.rate is None else f'{row.rate} Mbit/s'}"
            for row in rows
        ]
        places = range(len(rows))
        axes.barh(places, [row.sum_milliseconds for row in rows], color=FIRST, height=0.6)
        limits = [(place, row.limit_milliseconds) for place, row in enumerate(rows)]
        for place, limit in limits:
            if limit is not None:
                axes.plot([limit, limit], [place - 0.4, place + 0.4], color=SECOND)
        axes.set_yticks(list(places), names)
        axes.invert_yaxis()
        axes.set_title(f"{title}; yellow: the wire's limit", color=TEXT, fontsize=10, loc="left")
