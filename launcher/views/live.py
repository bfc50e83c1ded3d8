"""The live view of `launch cluster status --watch`: progress and each worker's share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.inventory.facts.gauges import Gauge
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import ProcessState
from launcher.runs.status import shards
from launcher.views.render import exchanged, figure, loss_text
from launcher.views.tables import COLOURS, Column, table
from launcher.views.telemetry import TelemetrySnapshot

_HOT = 85.0
_FULL = 0.95
_WIDE = 110
_LATE = 5.0
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = (
    Column("HOST", least=9),
    Column("DEVICE", least=11),
    Column("STATE"),
    Column("SHARE", right=True),
    Column("TOKENS/S", spare=1, right=True),
    Column("MEMORY", spare=2, right=True),
    Column("TEMP", spare=3, right=True),
    Column("LOAD", spare=4, right=True),
    Column("ATTEMPT", spare=5, right=True),
    Column("LAST EXIT", spare=6),
)
"""Columns after a process's name. A device's readings are shown once, at its first process."""


def live_view(snapshot: TelemetrySnapshot, width: int) -> RenderableType:
    """Return one picture, `width` columns wide."""
    view = snapshot.view
    parts: list[RenderableType] = [_title(snapshot), *_progress(snapshot, width), Text("")]
    parts.append(_workers(snapshot, width))
    said = (*view.remarks, *view.unreachable.values())
    notes = [Text(f"! {line}", "yellow", overflow="fold") for line in said]
    for failure in snapshot.failures:
        notes.append(Text(failure.heading, "bold red"))
        notes += [Text(line, "dim", overflow="ellipsis", no_wrap=True) for line in failure.text[1:]]
    if notes:
        parts += [Text(""), *notes]
    return Group(*parts)


def curve(values: Sequence[float], width: int) -> str:
    """Return values as bars with their scale, the newest at the right end.

    Each bar is the mean of its share of the values.
    """
    if not values:
        return ""
    count = min(width, len(values))
    cells = [
        values[index * len(values) // count : (index + 1) * len(values) // count]
        for index in range(count)
    ]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BARS[round((mean - low) * scale)] for mean in means)
    return (
        f"{bars}  {_BARS[-1]} {high:.3g}  {_BARS[0]} {low:.3g}" if scale else f"{bars}  {low:.3g}"
    )


def _title(snapshot: TelemetrySnapshot) -> Text:
    view = snapshot.view
    title = Text.assemble(
        (view.run.run_id, "bold"), "  ", (view.outcome, COLOURS.get(view.state, ""))
    )
    if view.run.started:
        title.append(f"  {_duration(time.time() - view.run.started)}", "dim")
    if view.reason and view.state != "failed":
        title.append(f"  {view.reason}", "yellow")
    if snapshot.age > _LATE:
        title.append(f"  (as it was {snapshot.age:.0f} s ago)", "red")
    return title


def _progress(snapshot: TelemetrySnapshot, width: int) -> list[RenderableType]:
    training: Mapping[str, Any] = snapshot.view.training or {}
    total, step = training.get("total_steps"), training.get("step")
    if not total or step is None:
        return []
    epoch, validation = training.get("epoch"), training.get("validation")
    line = Table.grid(padding=(0, 2))
    line.add_row(
        f"step {step}/{total}",
        ProgressBar(total=total, completed=step, width=min(40, max(10, width - 60))),
        f"{100 * step // total} %",
        "" if epoch is None else f"epoch {epoch + 1}",
        "" if snapshot.left is None else f"{_duration(snapshot.left)} left",
    )
    figures = [
        loss_text(training),
        figure("lr", training.get("learning_rate"), ".2e"),
        figure("", training.get("tokens_per_second"), ",.0f", " tokens/s"),
        _exchange(training),
    ]
    parts: list[RenderableType] = [line, _line(figures)]
    if validation is not None:
        scores = [
            figure("validation loss", validation.get("loss"), ".4f"),
            figure("accuracy", validation.get("accuracy"), ".3f"),
            figure("at step", validation.get("step"), "d"),
        ]
        parts.append(_line(scores))
    if len(snapshot.losses) > 1:
        bars = curve(snapshot.losses, min(60, max(10, width - 30)))
        parts.append(Text.assemble("loss ", (bars, "cyan"), overflow="ellipsis", no_wrap=True))
    return parts


def _exchange(training: Mapping[str, Any]) -> str:
    exposed = figure("", training.get("exchange_exposed_ms"), ".0f", " exposed")
    whole = figure("exchange", training.get("exchange_ms"), ".0f", " ms")
    taken = f"{whole} ({exposed})" if whole and exposed else whole
    return ", ".join(filter(None, (taken, *exchanged(training))))


def _line(figures: Sequence[str]) -> Text:
    return Text("  ".join(figure for figure in figures if figure))


def _workers(snapshot: TelemetrySnapshot, width: int) -> Table:
    view, wide = snapshot.view, width >= _WIDE
    samples = sum(member.get("samples") or 0 for member in view.members)
    ranked = bool(view.run.plan.workers)
    rows: list[tuple[str | Text, ...]] = []
    measured: set[tuple[str, str]] = set()
    for process in view.run.plan.processes:
        state = view.processes[process.name]
        member = view.member(process)
        device = (process.host, _first(process).lower())
        gauge = Gauge() if device in measured else _gauge(snapshot, process)
        measured.add(device)
        rows.append(
            (
                _who(process, ranked),
                process.host,
                _device(snapshot, process, wide),
                _state(state, member),
                shards(member) or _share(member, samples),
                figure("", member.get("tokens_per_second"), ",.0f") or "-",
                _memory(gauge),
                _temperature(gauge),
                "" if gauge.load is None else f"{gauge.load} %",
                str(state.attempt),
                state.ending or "-",
            )
        )
    who = Column("RANK" if ranked else "NAME", right=ranked)
    return table((who, *_COLUMNS), rows, width)


def _who(process: ProcessPlan, ranked: bool) -> str:
    if ranked:
        return "-" if process.rank is None else str(process.rank)
    return process.name


def _state(state: ProcessState, member: Mapping[str, Any]) -> Text:
    """Return the most specific state: for a running process the coordinator's."""
    word = str(member.get("state") or state.state) if state.state == "running" else state.state
    if word == "lost" and state.state == "running":
        word = "rejoining"  # its process is back
    return Text(word, COLOURS.get(word, ""))


def _device(snapshot: TelemetrySnapshot, process: ProcessPlan, wide: bool) -> str:
    if process.role == "coordinator":
        return "coordinator"
    if process.backend == "cpu" and not wide:
        return "cpu"
    host = snapshot.view.run.host(process.host)
    for device in host.devices or ():
        if device.answers_to(_first(process)) and device.name:
            kind = "cpu " if process.backend == "cpu" else ""
            count = f"{len(process.members)} x " if process.members else ""
            return count + kind + _short(device.name)
    return process.device or process.backend


def _first(process: ProcessPlan) -> str:
    """Return the device whose gauges are shown: of a replica group the leader's."""
    return next(iter(process.devices), "cpu")


def _short(name: str) -> str:
    for word in ("NVIDIA GeForce ", "NVIDIA ", "AMD Radeon ", "AMD ", "Intel(R) ", "(R)", "(TM)"):
        name = name.replace(word, "")
    return name


def _gauge(snapshot: TelemetrySnapshot, process: ProcessPlan) -> Gauge:
    gauges = snapshot.gauges.get(process.host, {})
    device = _first(process)
    return gauges.get(device) or gauges.get(device.lower()) or Gauge()


def _share(member: Mapping[str, Any], samples: int) -> str:
    mine = member.get("samples")
    if mine is None or samples == 0:
        return "-"
    return f"{100 * mine / samples:.0f} %"


def _memory(gauge: Gauge) -> Text:
    if gauge.memory_used is None:
        return Text("")
    used = gauge.memory_used / 2**30
    if gauge.memory_total is None:
        return Text(f"{used:.1f} GiB")
    total = gauge.memory_total / 2**30
    full = gauge.memory_used > _FULL * gauge.memory_total
    return Text(f"{used:.1f}/{total:.0f} GiB", "red" if full else "")


def _temperature(gauge: Gauge) -> Text:
    if gauge.temperature is None:
        return Text("")
    return Text(f"{gauge.temperature:.0f} °C", "red" if gauge.temperature >= _HOT else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
