"""The live view of `launch cluster status --watch`: progress and each worker's share."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from launcher.views.processes import processes_table
from launcher.views.tables import COLOURS
from launcher.views.telemetry import TelemetrySnapshot
from trainer.tracking.picture import duration, progress_picture

_LATE = 5.0
KEYS = (
    ("q", "leave; the run continues"),
    ("l", "the log of the marked process, or not"),
    ("up, down", "mark another process"),
    ("?", "these keys, or not"),
)


@dataclass(frozen=True)
class Look:
    """What is shown besides the state of the run."""

    events: tuple[str, ...] = ()
    """What happened lately, the newest last."""
    chosen: str = ""
    """The name of the marked process."""
    log: tuple[str, ...] | None = None
    """Its last lines; None: not asked for."""
    help: bool = False
    rows: int = 1
    """Rows of the loss's curve."""
    footer: bool = False
    """Whether there is a keyboard."""


def live_view(snapshot: TelemetrySnapshot, width: int, look: Look | None = None) -> RenderableType:
    """Return one picture, `width` columns wide."""
    view, look = snapshot.view, look or Look()
    parts: list[RenderableType] = [
        _title(snapshot),
        *progress_picture(view.training or {}, snapshot.losses, snapshot.left, width, look.rows),
        Text(""),
        processes_table(view, width, snapshot.gauges, look.chosen),
    ]
    said = (*view.remarks, *view.unreachable.values())
    notes = [Text(f"! {line}", "yellow") for line in said]
    for failure in snapshot.failures:
        notes.append(Text(failure.heading, "bold red"))
        notes += [_line(line) for line in failure.text[1:]]
    log = [] if look.log is None else [Text(f"log of {look.chosen}:", "bold")]
    log += map(_line, look.log or ())
    keys = [Text(f"{key:<10}{does}") for key, does in KEYS] if look.help else []
    for block in (notes, list(map(_line, look.events)), log, keys):
        if block:
            parts += [Text(""), *block]
    if look.footer and not look.help:
        parts += [Text(""), Text("q leave  l log  ? keys", "dim")]
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
