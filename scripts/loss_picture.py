"""Draw the loss of a run over its steps, as SVG: the picture in docs/demo.md.

python scripts/loss_picture.py demo/output [-o docs/loss-curve.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.tracking.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
# Those of the live view's picture beside it: a dark ground of its own reads on any page.
GROUND, TEXT, GRID = "#292929", "#c5c8c6", "#4a4a4a"
TRAINING, VALIDATION = "#68a0b3", "#f0c674"
STYLE = {
    "font.family": "sans-serif",
    "path.simplify": False,  # a point for each step
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "motley",  # the same names, so the same file, every time
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def main() -> int:
    """Draw the run of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="DIR", help="a run's output folder")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "loss-curve.svg")
    options = parser.parse_args()
    try:
        records = read_metrics(options.run / METRICS_FILE)
    except OSError as error:
        sys.exit(f"loss_picture: {options.run / METRICS_FILE}: {error.strerror}")
    training, validation = losses(records, "step"), losses(records, "validation")
    if len(training) < 2:
        sys.exit(f"loss_picture: {options.run / METRICS_FILE}: fewer than two steps have a loss")
    unfinished = options.output.with_name(f".{options.output.name}.new")
    with mpl.rc_context(STYLE):
        # No date: the same run gives the same file.
        draw(training, validation).savefig(
            unfinished, format="svg", metadata={"Date": None, "Title": "Loss over steps"}
        )
    unfinished.replace(options.output)
    print(f"{options.output}: {len(training)} steps, {len(validation)} validations")
    return 0


def losses(records: Sequence[dict[str, Any]], kind: str) -> list[tuple[int, float]]:
    """Return step and loss of each record of a kind; one that is not finite has none."""
    return [
        (record["step"], record["loss"])
        for record in records
        if record["kind"] == kind and record.get("loss") is not None
    ]


def draw(training: list[tuple[int, float]], validation: list[tuple[int, float]]) -> Figure:
    """Return the figure: each step's loss as a line, each validation's as a dot on another."""
    figure = Figure(figsize=(8, 3.2), facecolor=GROUND)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    axes = figure.add_subplot(facecolor=GROUND)
    axes.plot(*zip(*training, strict=True), color=TRAINING, lw=1, label="training", gid="training")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color=VALIDATION,
            lw=2,
            marker="o",
            label="validation",
            gid="validation",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, lw=0.5)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
