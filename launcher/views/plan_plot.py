"""A plan as a picture: memory by part, speed by number of devices, and pipelines over time."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# matplotlib is typed in part.
from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import ConfigError
from trainer.planning.devices import GIB
from trainer.planning.scaling import Point, scaling
from trainer.planning.schedules import idle_share, timeline
from trainer.planning.strategies import Request, StrategyOption
from trainer.system.storage.atomic_file import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A dark ground of its own reads on any page; the other pictures of the documentation have it too.
_GROUND, _TEXT, _GRID = "#292929", "#c5c8c6", "#4a4a4a"
_COLOURS = ("#68a0b3", "#f0c674", "#de935f", "#b5bd68", "#b294bb", "#cc6666")
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "motley",  # the same names, so the same file, every time
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.facecolor": _GROUND,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
}
_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "inputs": "backward to activations",
    "weights": "backward to weights",
}


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is planned.

    Raises:
        ConfigError: matplotlib is absent, or the file is no .svg of an existing folder.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(
            f"--plot {path}: the picture is an SVG; name it {path.stem or 'plan'}.svg"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: no folder {path.parent}")
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: pip install 'motley[plot]'"
        ) from None
    del mpl


def plot(path: Path, request: Request, found: Sequence[StrategyOption]) -> None:
    """Draw a plan; panels without figures are left out.

    Raises:
        ConfigError: the file cannot be written; what was there is unchanged.
    """
    import matplotlib as mpl

    drawn = io.BytesIO()
    with mpl.rc_context(_STYLE):
        # No date: the same plan gives the same file.
        metadata = {"Date": None, "Title": f"Plan of {request.shape.name}"}
        draw(request, found).savefig(drawn, format="svg", metadata=metadata)
    try:
        write_atomically(path, drawn.getvalue(), mode=0o644, durable=False)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None


def draw(request: Request, found: Sequence[StrategyOption]) -> Figure:
    """Return the picture of a plan."""
    from matplotlib.figure import Figure

    points = {name: curve for name, curve in scaling(request).items() if len(curve) > 1}
    pipelines = [
        option
        for option in found
        if option.strategy.stages > 1 and option.strategy.tensor == 1 and not option.alternative
    ]
    stages = max((option.strategy.stages for option in pipelines), default=0)
    heights = [0.5 + 0.2 * len(found), *([2.8] if points else [])]
    heights += [0.45 + 0.11 * stages] * len(pipelines)
    figure = Figure(figsize=(10, sum(heights) + 0.6), facecolor=_GROUND)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.05)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _memory(figure.add_subplot(grid[0, :]), request, found)
    if points:
        _curves(figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1]), points)
    first = len(heights) - len(pipelines)
    for row, option in enumerate(pipelines):
        axes = figure.add_subplot(grid[first + row, :])
        _pipeline(axes, option)
        if row == len(pipelines) - 1:
            axes.set_xlabel("forwards of one chunk of layers; a whole backward takes two")
            _kinds(figure)
    return figure


def _memory(axes: Axes, request: Request, found: Sequence[StrategyOption]) -> None:
    names = [option.title for option in found]
    left = [0.0] * len(found)
    for part, colour in zip(found[0].memory.bytes(), _COLOURS, strict=True):
        sizes = [option.memory.bytes()[part] / GIB for option in found]
        axes.barh(names, sizes, left=left, color=colour, label=part, height=0.7)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(found[0].room / GIB, color=_TEXT, lw=1, ls="--", label="usable on a device")
    axes.invert_yaxis()
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("GiB of the device that needs most")
    axes.set_title(f"{request.shape.name}, {request.method}, on {request.cluster.text}: memory")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _curves(speed: Axes, time: Axes, points: dict[str, list[Point]]) -> None:
    from matplotlib.ticker import MaxNLocator

    most = max(point.devices for curve in points.values() for point in curve)
    for (name, curve), colour in zip(points.items(), _COLOURS, strict=False):
        devices = [point.devices for point in curve]
        style: dict[str, Any] = {"color": colour, "marker": "o", "ms": 3, "label": name}
        speed.plot(devices, [point.speedup for point in curve], **style)
        time.plot(devices, [point.hours for point in curve], **style)
    speed.plot([1, most], [1, most], color=_GRID, lw=1, ls=":", label="linear")
    speed.set_title("speed, as a multiple of the first device's alone")
    time.set_title("hours for the tokens")
    for axes in (speed, time):
        axes.set_xlabel("devices")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=_GRID, lw=0.5)
        axes.set_ylim(bottom=0)
    speed.legend(loc="upper left")


def _pipeline(axes: Axes, option: StrategyOption) -> None:
    strategy = option.strategy
    made = timeline(strategy.schedule, strategy.stages, strategy.microbatches, strategy.chunks)
    colours = dict(zip(_KINDS, _COLOURS, strict=False))
    for rank, actions in enumerate(made):
        bars = [(action.start, action.stop - action.start) for action in actions]
        faces = [colours[action.kind] for action in actions]
        axes.broken_barh(bars, (rank - 0.4, 0.8), color=faces, ec=_GROUND, lw=0.3)
    axes.set_title(
        f"{strategy.schedule}, {strategy.microbatches} micro-batches: its bubble is"
        f" {idle_share(made):.0%} of an ideal step"
    )
    axes.set_yticks([0, strategy.stages - 1], ["stage 0", f"stage {strategy.stages - 1}"])
    axes.set_ylim(strategy.stages - 0.5, -0.5)
    axes.set_xlim(0, max(actions[-1].stop for actions in made))


def _kinds(figure: Figure) -> None:
    from matplotlib.patches import Patch

    named = zip(_KINDS.values(), _COLOURS, strict=False)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in named],
        loc="outside lower right",
        ncols=len(_KINDS),
    )
