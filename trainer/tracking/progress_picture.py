"""How far a run is, as both programs draw it on a terminal: a bar, figures, the loss's curve.

It is drawn from the dictionaries of status.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = " ▁▂▃▄▅▆▇█"
_GAP = "  "


def progress_picture(
    training: Mapping[str, Any],
    losses: Sequence[float],
    left: float | None,
    width: int,
    height: int = 1,
) -> list[RenderableType]:
    """Return a run's progress as lines of at most `width` columns; nothing before its first step.

    Args:
        losses: of the steps so far, the newest last.
        left: seconds to the last step, if they are known.
        height: rows of the curve.
    """
    total, step = training.get("total_steps"), training.get("step")
    if not total or step is None:
        return []
    epoch, validation = training.get("epoch"), training.get("validation")
    words = [
        "" if epoch is None else f"epoch {epoch + 1}",
        "" if left is None else f"{format_duration(left)} left",
    ]
    line = Table.grid(padding=(0, 2))
    line.add_row(
        f"step {step}/{total}",
        ProgressBar(total=total, completed=step, width=min(40, max(10, width - 60))),
        f"{100 * step // total} %",
        *words,
    )
    figures = [
        loss_text(training),
        format_figure("lr", training.get("learning_rate"), ".2e"),
        format_rate(training),
        _describe_exchange(training),
    ]
    parts: list[RenderableType] = [line, *_wrap_figures(figures, width)]
    if validation is not None:
        scores = [
            format_figure("validation loss", validation.get("loss"), ".4f"),
            format_figure("accuracy", validation.get("accuracy"), ".3f"),
            format_figure("MCC", validation.get("mcc"), ".3f"),
            format_figure("reward margin", validation.get("reward_margin"), ".3f"),
            format_figure("reward accuracy", validation.get("reward_accuracy"), ".3f"),
            format_figure("at step", validation.get("step"), "d"),
        ]
        parts += _wrap_figures(scores, width)
    if len(losses) > 1:
        parts += [
            Text(f"{title}{row}", "cyan", overflow="ellipsis", no_wrap=True)
            for title, row in zip(
                ("loss ", *["     "] * height),
                draw_chart(losses, min(60, max(10, width - 20)), height),
                strict=False,
            )
        ]
    return parts


def draw_chart(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Return values as columns with their scale, the newest at the right end.

    Each column is the mean of its part of the values. The first row ends with the highest mean, the
    last with the lowest; a chart of one row has both.
    """
    if not values:
        return []
    count = min(width, len(values))
    cells = [
        values[index * len(values) // count : (index + 1) * len(values) // count]
        for index in range(count)
    ]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((mean - low) * scale) for mean in means]
    rows = [
        "".join(_BARS[min(8, max(0, level - 8 * (height - 1 - row)))] for level in levels)
        for row in range(height)
    ]
    if not scale:
        return [f"{rows[-1]}{_GAP}{low:.3g}"]
    if height == 1:
        return [f"{rows[0]}{_GAP}█ {high:.3g}{_GAP}▁ {low:.3g}"]
    return [f"{rows[0]}{_GAP}{high:.3g}", *rows[1:-1], f"{rows[-1]}{_GAP}{low:.3g}"]


def format_figure(name: str, value: float | None, style: str, unit: str = "") -> str:
    """Return a figure of a report with its name; empty where there is none."""
    return "" if value is None else f"{name} {value:{style}}{unit}".strip()


def format_rate(training: Mapping[str, Any]) -> str:
    """Return `4,200 tokens/s` from a report; empty where there is no rate."""
    unit = f" {training.get('unit', 'tokens')}/s"
    return format_figure("", training.get("tokens_per_second"), ",.0f", unit)


def loss_text(training: Mapping[str, Any]) -> str:
    """Return the loss of the last step; `-`: no token of it was learned."""
    return format_figure("loss", training.get("loss"), ".4f") or (
        "loss -" if training.get("step") else ""
    )


def describe_exchange(training: Mapping[str, Any]) -> list[str]:
    """Return the codec of the last step and, if it was a round, of how many steps that is."""
    codec, steps = training.get("codec"), training.get("inner_steps")
    return [*([str(codec)] if codec else []), *([f"rounds of {steps} steps"] if steps else [])]


def share_text(samples: int | None, of: int) -> str:
    """Return a worker's part of a step's samples in percent; `-` if it has none."""
    return f"{100 * samples / of:.0f} %" if samples and of else "-"


def format_duration(seconds: float) -> str:
    """Return 95 seconds as `1:35`, 3700 as `1:01:40`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _describe_exchange(training: Mapping[str, Any]) -> str:
    exposed = format_figure("", training.get("exchange_exposed_ms"), ".0f", " exposed")
    whole = format_figure("exchange", training.get("exchange_ms"), ".0f", " ms")
    taken = f"{whole} ({exposed})" if whole and exposed else whole
    return ", ".join(filter(None, (taken, *describe_exchange(training))))


def _wrap_figures(figures: Sequence[str], width: int) -> list[Text]:
    """Return figures in lines; none is broken that fits a line."""
    lines: list[str] = []
    for part in filter(None, figures):
        if lines and len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += f"{_GAP}{part}"
        else:
            lines.append(part)
    return [Text(line) for line in lines]
