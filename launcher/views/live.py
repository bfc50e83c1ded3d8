"""The live view of `launch cluster status --watch`: progress and each worker's share."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from launcher.views.processes import processes_table
from launcher.views.tables import COLOURS
from launcher.views.telemetry import TelemetrySnapshot
from trainer.tracking.picture import duration, progress_picture

_LATE = 5.0


def live_view(
    snapshot: TelemetrySnapshot, width: int, events: tuple[str, ...] = (), rows: int = 1
) -> RenderableType:
    """Return one picture, `width` columns wide.

    Args:
        events: the last ones, the newest last.
        rows: of the loss's curve.
    """
    view = snapshot.view
    parts: list[RenderableType] = [
        _title(snapshot),
        *progress_picture(view.training or {}, snapshot.losses, snapshot.left, width, rows),
        Text(""),
        processes_table(view, width, snapshot.gauges),
    ]
    said = (*view.remarks, *view.unreachable.values())
    notes = [Text(f"! {line}", "yellow") for line in said]
    for failure in snapshot.failures:
        notes.append(Text(failure.heading, "bold red"))
        notes += [_line(line) for line in failure.text[1:]]
    for block in (notes, list(map(_line, events))):
        if block:
            parts += [Text(""), *block]
    return Group(*parts)


def _line(text: str) -> Text:
    return Text(text, "dim", overflow="ellipsis", no_wrap=True)


def _title(snapshot: TelemetrySnapshot) -> Text:
    view = snapshot.view
    title = Text.assemble(
        (view.run.run_id, "bold"), "  ", (view.outcome, COLOURS.get(view.state, ""))
    )
    if view.run.started:
        title.append(f"  {duration(time.time() - view.run.started)}", "dim")
    if view.reason and view.state not in ("failed", "completed"):
        title.append(f"  {view.reason}", "yellow")
    if snapshot.age > _LATE:
        title.append(f"  (as it was {snapshot.age:.0f} s ago)", "red")
    return title
