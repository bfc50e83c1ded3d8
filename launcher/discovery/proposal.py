"""Propose the coordinator, the share server, the teacher and the student, with reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.discovery.links import MeasuredLink
from launcher.inventory.facts.network import format_speed
from launcher.inventory.hosts import Host
from launcher.plan.distillation import student_host, teacher_hosts

_EQUAL = 0.9
"""Links whose rates differ by less than a tenth count as equally fast."""


@dataclass(frozen=True)
class Role:
    """A proposed role, and the figures that decided."""

    host: str
    reason: str


@dataclass(frozen=True)
class Proposal:
    """The proposed roles of some machines."""

    coordinator: Role
    share: Role
    teacher: Role
    student: Role


def propose_roles(
    hosts: Sequence[Host], disks: Mapping[str, int], links: Sequence[MeasuredLink]
) -> Proposal:
    """Return the roles of surveyed hosts; at least one.

    Teacher and student are those that a distillation without roles would choose.

    Args:
        disks: free bytes by host, where known.
    """
    student = student_host(hosts)
    teacher = teacher_hosts(hosts, student)[0]
    return Proposal(
        coordinator=_choose_coordinator(hosts, links),
        share=_choose_file_server(hosts, disks),
        teacher=Role(teacher.name, _teacher_reason(teacher, student, hosts)),
        student=Role(student.name, _student_reason(student)),
    )


def _choose_coordinator(hosts: Sequence[Host], links: Sequence[MeasuredLink]) -> Role:
    """Every exchange goes through it: the most hosts reached, by the fastest slowest link."""
    own = {
        host.name: [link for link in links if host.name in (link.source, link.target)]
        for host in hosts
    }
    # An unknown link is no evidence against a host.
    reached = {
        name: sum(link.unknown or not link.problem for link in found) for name, found in own.items()
    }
    slowest = {
        name: min((link.rate or 0.0 for link in found if not link.problem), default=0.0)
        for name, found in own.items()
    }
    most = max(reached.values())
    fast = [host for host in hosts if reached[host.name] == most]
    least = _EQUAL * max(slowest[host.name] for host in fast)
    fast = [host for host in fast if slowest[host.name] >= least]
    best = max(fast, key=lambda host: host.memory or 0)
    if len(hosts) == 1:
        return Role(best.name, "the only host")
    parts: list[str] = []
    if links:
        others = len(hosts) - 1
        unknown = sum(link.unknown for link in own[best.name])
        sure = most - unknown
        whom = "every other host" if sure == others else f"{sure} of {others} other hosts"
        parts.append(f"reaches {whom}" + (f", {unknown} not measured" if unknown else ""))
        if slowest[best.name]:
            parts.append(f"its slowest link is {format_speed(slowest[best.name])}")
    if len(fast) > 1 and best.memory:
        also = " of the hosts so well linked" if len(fast) < len(hosts) else ""
        parts.append(f"the most memory{also}, {size_text(best.memory)}")
    return Role(best.name, "; ".join(parts) or "the first host")


def _choose_file_server(hosts: Sequence[Host], disks: Mapping[str, int]) -> Role:
    best = max(hosts, key=lambda host: disks.get(host.name, 0))
    if best.name not in disks:
        return Role(best.name, "the first host; free disk is not known")
    return Role(best.name, f"the most free disk, {size_text(disks[best.name])}")


def _student_reason(host: Host) -> str:
    cards = [device for device in host.devices or () if device.backend == "cuda"]
    if not cards:
        return f"no host has a CUDA card; the most cores, {host.cores or 'unknown'}"
    best = max(cards, key=lambda card: card.memory or 0)
    memory = f", {size_text(best.memory)}" if best.memory else ""
    return f"the CUDA card with the most memory, {best.name or best.id}{memory}"


def _teacher_reason(host: Host, student: Host, hosts: Sequence[Host]) -> str:
    memory = size_text(host.memory) if host.memory else "unknown"
    if host is student:
        return "the only host"
    beside = f" beside {student.name}" if len(hosts) > 2 else f"; {student.name} is the student"
    return f"the most memory{beside}, {memory}" if len(hosts) > 2 else f"{memory} memory{beside}"


def size_text(size: int) -> str:
    """Return bytes for people."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size >> 20} MiB"
