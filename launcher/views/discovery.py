"""The result of a discovery, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.discovery.host_queries import FoundMachine
from launcher.discovery.links import MeasuredLink
from launcher.discovery.proposal import size_text
from launcher.discovery.search import Discovery
from launcher.inventory.facts.network import format_speed
from launcher.views import render
from launcher.views.tables import Column, make_table

_FOUND = (
    Column("HOST"),
    Column("ADDRESS"),
    Column("FOUND BY", spare=4),
    Column("DEVICES", words=True, least=12),
    Column("CORES", spare=3, right=True),
    Column("MEMORY", spare=1, right=True),
    Column("FREE DISK", spare=2, right=True),
    Column("MOTLEY"),
)
_REFUSED = (Column("NOT ASKED"), Column("FOUND BY", spare=1), Column("WHY", words=True, least=20))
_LINKS = (
    Column("FROM"),
    Column("TO"),
    Column("RATE", words=True, least=10),
    Column("BACK", right=True),
    Column("ROUND TRIP", spare=1, right=True),
)


def show_survey(found: Discovery) -> None:
    """Print machines, refusals, links, the proposal, and how the file has changed."""
    width = render.terminal_width()
    if found.found:
        rows = [_machine_row(one) for one in found.found]
        render.make_console().print(make_table(_FOUND, rows, width))
    if found.refused:
        refused = [
            (
                one.candidate.host.name,
                ", ".join(one.candidate.sources),
                str(one.error).removeprefix(f"host {one.candidate.host.name}: "),
            )
            for one in found.refused
        ]
        render.make_console().print(make_table(_REFUSED, refused, width))
    if found.links:
        render.make_console().print(
            make_table(_LINKS, [_link_row(link) for link in found.links], width)
        )
    for line in _survey_lines(found):
        render.print_line(line)


def _machine_row(one: FoundMachine) -> list[str]:
    problems = [*one.detection.problems, *one.detection.vulkan_problems]
    return [
        one.name,
        one.address if one.port == 22 else f"{one.address}:{one.port}",
        ", ".join(one.sources),
        "; ".join([*([one.devices] if one.devices else []), *problems]),
        str(one.machine.cores),
        size_text(one.machine.memory) if one.machine.memory else "?",
        size_text(one.disk) if one.disk is not None else "?",
        "-" if one.missing else one.machine.version or "?",
    ]


def _link_row(link: MeasuredLink) -> list[str]:
    if link.problem:
        return [
            link.source,
            link.target,
            f"{'unknown' if link.unknown else 'none'}: {link.problem}",
            "",
            "",
        ]
    rates = [
        format_speed(rate) if rate is not None else "?"
        for rate in (link.forward_rate, link.reverse_rate)
    ]
    return [link.source, link.target, *rates, f"{1e3 * (link.round_trip or 0):.1f} ms"]


def _survey_lines(found: Discovery) -> list[str]:
    lines: list[str] = []
    if found.proposal is not None:
        for name, role in asdict(found.proposal).items():
            lines.append(f"{name}: {role['host']} ({role['reason']})")
    if found.written is None:
        return lines
    path = found.written.path
    if not found.written.difference:
        return [*lines, f"{path}: unchanged"]
    lines += found.written.difference
    bare = [one.name for one in found.found if one.missing]
    if bare:
        lines.append(
            f"{path}: written; next: ansible-playbook -i {path} recipes/gpu-training.yml "
            f"(no Motley yet on {', '.join(bare)})"
        )
    else:
        lines.append(f"{path}: written; next: launch doctor -i {path}")
    return lines


def discovery_tree(found: Discovery) -> dict[str, Any]:
    """Return what was discovered as JSON (`motley.discovery/2`)."""
    written = found.written
    return {
        "schema": "motley.discovery/2",
        "hosts": [_host_tree(one) for one in found.found],
        "refused": [
            {
                "name": one.candidate.host.name,
                "address": one.candidate.host.address,
                "sources": one.candidate.sources,
                "error": str(one.error),
                "exit_code": one.error.exit_code,
            }
            for one in found.refused
        ],
        "links": [asdict(link) for link in found.links],
        "proposal": None if found.proposal is None else asdict(found.proposal),
        "inventory": None if written is None else str(written.path),
        "diff": [] if written is None else written.difference,
    }


def _host_tree(one: FoundMachine) -> dict[str, Any]:
    return {
        "name": one.name,
        "hostname": one.machine.hostname,
        "address": one.address,
        "port": one.port,
        "user": one.user,
        "sources": one.sources,
        "host_key": one.host_key,
        "devices": [asdict(device) for device in one.detection.devices],
        "other_devices": [asdict(device) for device in one.detection.vulkan],
        "problems": [*one.detection.problems, *one.detection.vulkan_problems],
        "cores": one.machine.cores,
        "memory": one.machine.memory,
        "free_disk": one.disk,
        "motley_version": one.machine.version or None,
        "missing_reason": one.missing or None,
    }
