"""The live view of `launch status --watch`: progress, each worker's share, last events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from launcher.runs.status import RunView
from launcher.views.processes import processes_table
from launcher.views.tables import COLOURS
from launcher.views.telemetry import TelemetrySnapshot
from trainer.tracking.progress_picture import format_duration, format_figure, progress_picture

_LATE = 5.0
_KEPT = 5
"""Events that are shown."""


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
        _panel_title(snapshot),
        *progress_picture(view.training or {}, snapshot.losses, snapshot.left, width, rows),
        Text(""),
        processes_table(view, width, snapshot.gauges),
    ]
    remarks = (*view.remarks, *view.unreachable.values())
    notes = [Text(f"! {line}", "yellow") for line in remarks]
    for failure in snapshot.failures:
        notes.append(Text(failure.heading, "bold red"))
        notes += [_one_line(line) for line in failure.lines[1:]]
    for block in (notes, list(map(_one_line, events))):
        if block:
            parts += [Text(""), *block]
    return Group(*parts)


def _one_line(text: str) -> Text:
    return Text(text, "dim", overflow="ellipsis", no_wrap=True)


def _panel_title(snapshot: TelemetrySnapshot) -> Text:
    view = snapshot.view
    title = Text.assemble(
        (view.run.run_id, "bold"), "  ", (view.outcome, COLOURS.get(view.state, ""))
    )
    if view.run.started:
        title.append(f"  {format_duration(time.time() - view.run.started)}", "dim")
    if view.reason and view.state not in ("failed", "completed"):
        title.append(f"  {view.reason}", "yellow")
    if snapshot.age > _LATE:
        title.append(f"  (as it was {snapshot.age:.0f} s ago)", "red")
    return title


class EventFeed:
    """The last events, each with its local time, the newest last."""

    def __init__(self, now: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._now = now
        self._known: dict[str, str] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def update(self, view: RunView) -> tuple[str, ...]:
        """Take a look into account; return the last events."""
        facts = dict(_list_facts(view))
        before = self._known
        if before is not None:
            self._lines.extend(
                f"{self._now()} {text}" for key, text in facts.items() if before.get(key) != text
            )
        self._known = {**(before or {}), **facts}  # what is not said for a while did not change
        return tuple(self._lines)


def _list_facts(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield what changes seldom, by what it is about, in words."""
    yield "run", f"the run is {view.outcome}"
    for process in view.run.plan.processes:
        state, member = view.processes[process.name], view.find_report(process)
        attempt = f", attempt {state.attempt}" if state.attempt > 1 else ""
        ending = f" ({state.last_end})" if state.last_end and state.exit_code != 0 else ""
        yield process.name, f"{process.name}: {state.state}{ending}{attempt}"
        if process.role == "worker" and state.state == "running" and member.get("state"):
            yield f"{process.name}/member", f"{process.name}: {member['state']}"
    training: Mapping[str, Any] = view.training or {}
    if validation := training.get("validation"):
        scores = (
            format_figure("loss", validation.get("loss"), ".4f"),
            format_figure("accuracy", validation.get("accuracy"), ".3f"),
        )
        text = ", ".join(filter(None, scores))
        yield "validation", f"validation at step {validation.get('step')}: {text}"
    if checkpoint := training.get("checkpoint"):
        yield "checkpoint", f"checkpoint of step {checkpoint.get('step')}"
