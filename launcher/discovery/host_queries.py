"""Ask every candidate for its identity and devices; a refusal is one line and affects no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from launcher.agent.operations import (
    DEVICES_DEADLINE,
    describe_machine,
    detect_devices,
    read_free_disk,
)
from launcher.discovery.candidates import Candidate, Source, choose_host_name
from launcher.errors import LauncherError, UnreachableError
from launcher.files import MANAGED_STATE
from launcher.hosts import ssh
from launcher.hosts.base import Connection
from launcher.hosts.fleet import AT_ONCE, REACH, ask_each
from launcher.hosts.survey import apply_devices
from launcher.inventory.facts.devices import Detection
from launcher.inventory.facts.machine import Machine
from launcher.inventory.hosts import Host


@dataclass(frozen=True, kw_only=True)
class FoundMachine:
    """A machine that answered."""

    host: Host
    """As it is reached, with its devices, cores and memory."""
    sources: tuple[Source, ...]
    machine: Machine
    detection: Detection
    connection: Connection
    address: str
    """Where ssh connects to."""
    port: int
    user: str
    disk: int | None = None
    """Free bytes where runs are kept; None when unknown."""
    host_key: str = ""
    """Fingerprint of the verified SSH host key."""
    missing: str = ""
    """Why no installed Motley answered; empty if one did."""
    is_open: bool = True
    """Whether its connection is still open; `AT_ONCE` of them stay open."""

    @property
    def name(self) -> str:
        """The name in an inventory."""
        return self.host.name

    @property
    def devices(self) -> str:
        """Devices that `auto` would train on, equal ones counted."""
        names = [device.name or device.id for device in self.detection.devices]
        counts = {name: names.count(name) for name in names}
        return ", ".join(
            f"{count} x {name}" if count > 1 else name for name, count in counts.items()
        )


@dataclass(frozen=True)
class RefusedMachine:
    """A candidate that could not be asked."""

    candidate: Candidate
    error: LauncherError

    @property
    def is_error(self) -> bool:
        """Whether it is an error: the host was named, or its key has changed."""
        return self.candidate.is_named or ssh.is_changed_key(self.error)


def ask_all(candidates: Sequence[Candidate]) -> tuple[list[FoundMachine], list[RefusedMachine]]:
    """Ask all candidates; two names of one machine are one, the first one's."""
    keyed = {str(number): candidate for number, candidate in enumerate(candidates)}
    opened = itertools.count(1)
    questions = {
        key: (one.host, partial(_ask_candidate, one, opened)) for key, one in keyed.items()
    }
    answers = ask_each(questions, REACH + DEVICES_DEADLINE, ssh.visit_host)
    refused: list[RefusedMachine] = []
    for key, error in answers.errors.items():
        if not isinstance(error, LauncherError):
            error = UnreachableError(f"host {keyed[key].host.name}: {error}")
        refused.append(RefusedMachine(keyed[key], error))
    found: dict[str, FoundMachine] = {}
    for one in answers.found.values():
        known = found.get(one.machine.identity)
        if known is None:
            found[one.machine.identity] = one
        else:
            sources = tuple(dict.fromkeys((*known.sources, *one.sources)))
            found[one.machine.identity] = replace(known, sources=sources)
    return _with_names(list(found.values())), refused


def shared_keys(found: Sequence[FoundMachine]) -> list[str]:
    """Return a line for each host key that several machines have."""
    holders: dict[str, list[str]] = {}
    for one in found:
        if one.host_key:
            holders.setdefault(one.host_key, []).append(one.name)
    return [
        f"hosts {', '.join(names)}: different machines with one host key {key}, so each can pose "
        f"as the other; on all but one: sudo rm /etc/ssh/ssh_host_*; sudo ssh-keygen -A"
        for key, names in holders.items()
        if len(names) > 1
    ]


def _ask_candidate(
    candidate: Candidate, opened: Iterator[int], visited: tuple[Connection, str]
) -> FoundMachine:
    host = candidate.host
    connection, missing = visited
    route = ssh.find_route(host)
    machine = connection.ask(describe_machine)
    detection = connection.ask(detect_devices)
    folder = host.state_folder or (MANAGED_STATE if missing else connection.state_folder)
    disk = connection.ask(read_free_disk, folder)
    is_open = next(opened) <= AT_ONCE
    if not is_open:
        connection.close()
    learned, _ = apply_devices(host, detection)
    return FoundMachine(
        host=replace(learned, cores=machine.cores, memory=machine.memory),
        sources=candidate.sources,
        machine=machine,
        detection=detection,
        connection=connection,
        address=route.address,
        port=route.port,
        user=route.user,
        disk=disk,
        host_key=connection.host_key,
        missing=missing,
        is_open=is_open,
    )


def _with_names(found: Sequence[FoundMachine]) -> list[FoundMachine]:
    """Name those that were found by an address as they call themselves; no name is given twice."""
    taken: set[str] = set()
    named: list[FoundMachine] = []
    for one in sorted(found, key=lambda one: _RANK[one.sources[0]]):
        candidates = [one.name]
        if one.sources[0] == "address":
            candidates.insert(0, one.machine.hostname.partition(".")[0])
        name = one.name if one.sources[0] == "inventory" else choose_host_name(candidates, taken)
        taken.add(name)
        named.append(replace(one, host=replace(one.host, name=name)))
    return named


_RANK: Mapping[Source, int] = {"inventory": 0, "ssh config": 1, "address": 2, "mDNS": 3}
"""Whose names stay: those that people have given come first."""
