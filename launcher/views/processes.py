"""The table of a run's processes, of `launch status` and of its live view alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.inventory.facts.gauges import Gauge
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import ProcessState
from launcher.runs.status import RunView, shards_written
from launcher.views.tables import COLOURS, Column, make_table
from trainer.tracking.progress_picture import format_figure, share_text

_WARM = 70.0
_HOT = 85.0
_FULL = 0.95
_WIDE = 110
_BAR = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLUMNS = (
    Column("NAME"),
    Column("HOST", least=8),
    Column("DEVICE", least=9),
    Column("STATE"),
    Column("BATCH", right=True),
    Column("", spare=5),
    Column("{unit}/S", spare=2, right=True),
    Column("MEMORY", spare=3, right=True),
    Column("TEMP", spare=4, right=True),
    Column("LOAD", spare=6, right=True),
    Column("ATTEMPT", spare=2, right=True),
    Column("LAST EXIT", spare=1, words=True, least=11),
)
"""A column of which no process has anything is left out."""

Gauges = Mapping[str, Mapping[str, Gauge]]
"""Readings by host and device; they are shown once a device, at its first process."""


def processes_table(view: RunView, width: int | None, gauges: Gauges | None = None) -> Table:
    """Return a row for each process.

    Args:
        gauges: of the live view, which draws bars of the shares too.
    """
    at_work = [member for member in view.worker_reports if _has_share(member)]
    samples = sum(member.get("samples") or 0 for member in at_work)
    measured: set[tuple[str, str]] = set()
    rows: list[tuple[str | Text, ...]] = []
    for process in view.run.plan.processes:
        state = view.processes[process.name]
        member = view.find_report(process)
        device = (process.host, _first_device(process).lower())
        gauge = Gauge() if device in measured else _find_gauge(gauges or {}, process)
        measured.add(device)
        mine = (member.get("samples") or 0) if _has_share(member) else 0
        rows.append(
            (
                process.name,
                process.host,
                _device_name(view, process, width is None or width >= _WIDE),
                _process_state(state, member),
                shards_written(member) or share_text(mine, samples),
                Text(_draw_bar(mine / samples), "cyan") if gauges is not None and samples else "",
                format_figure("", member.get("tokens_per_second"), ",.0f") or "-",
                _format_memory(gauge),
                _format_temperature(gauge),
                "" if gauge.load is None else f"{gauge.load} %",
                str(state.attempt) if state.attempt > 1 else "-",
                "-" if state.exit_code == 0 else state.last_end or "-",
            )
        )
    unit = (view.training or {}).get("unit", "tokens").upper()
    columns = [replace(column, name=column.name.format(unit=unit)) for column in _COLUMNS]
    return make_table(columns, rows, width)


def _has_share(member: Mapping[str, Any]) -> bool:
    """Whether the samples of a worker's last step are its share still."""
    return member.get("state") not in ("idle", "lost")


def _draw_bar(part: float) -> str:
    """Return a bar of a part of the whole."""
    eighths = round(8 * _BAR * part)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip() if eighths else ""


def _process_state(state: ProcessState, member: Mapping[str, Any]) -> Text:
    """Return the most specific state: for a running process the coordinator's."""
    word = str(member.get("state") or state.state) if state.state == "running" else state.state
    if word == "lost" and state.state == "running":
        word = "rejoining"  # its process is back
    return Text(word, COLOURS.get(word, ""))


def _device_name(view: RunView, process: ProcessPlan, wide: bool) -> str:
    if process.role == "coordinator":
        return "-"
    if process.backend == "cpu" and not wide:
        return "cpu"
    host = view.run.find_host(process.host)
    for device in host.devices or ():
        if device.answers_to(_first_device(process)) and device.name:
            kind = "cpu " if process.backend == "cpu" else ""
            count = f"{len(process.members)} x " if process.members else ""
            return count + kind + _shorten_name(device.name)
    return process.device or process.backend or "-"


def _first_device(process: ProcessPlan) -> str:
    """Return the device whose gauges are shown: of a replica group the leader's."""
    return next(iter(process.devices), "cpu")


def _shorten_name(name: str) -> str:
    for word in ("NVIDIA GeForce ", "NVIDIA ", "AMD Radeon ", "AMD ", "Intel(R) ", "(R)", "(TM)"):
        name = name.replace(word, "")
    return name


def _find_gauge(gauges: Gauges, process: ProcessPlan) -> Gauge:
    here, device = gauges.get(process.host, {}), _first_device(process)
    return here.get(device) or here.get(device.lower()) or Gauge()


def _format_memory(gauge: Gauge) -> Text:
    if gauge.memory_used is None:
        return Text("")
    used = gauge.memory_used / 2**30
    if gauge.memory_total is None:
        return Text(f"{used:.1f} GiB")
    total = gauge.memory_total / 2**30
    full = gauge.memory_used > _FULL * gauge.memory_total
    return Text(f"{used:.1f}/{total:.0f} GiB", "red" if full else "")


def _format_temperature(gauge: Gauge) -> Text:
    if gauge.temperature is None:
        return Text("")
    degrees = gauge.temperature
    colour = "red" if degrees >= _HOT else "yellow" if degrees >= _WARM else "green"
    return Text(f"{degrees:.0f} °C", colour)
