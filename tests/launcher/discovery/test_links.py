"""Hosts that are asked and measured: many of them, slow ones, and those that answer nonsense."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from launcher.discovery.candidates import Candidate
from launcher.discovery.host_queries import FoundMachine, ask_all
from launcher.discovery.links import measure_links
from launcher.hosts.fleet import AT_ONCE
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.needs("ssh")]  # which says where a host is

ODD = (math.nan, math.inf, -math.inf, 10**400, -1)
NUMBERS = pytest.mark.parametrize("odd", ODD, ids=["nan", "inf", "-inf", "huge", "-1"])


class Neighbour(LocalConnection):
    """This machine as a host with an address of its own; one value of its answers may be odd."""

    def __init__(self, name: str, address: str, lie: tuple[str, str, Any] | None = None) -> None:
        super().__init__()
        self.host = name
        self.address = address
        self.is_closed = False
        self._lie = lie
        self._listening = threading.Lock()

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 10.0
    ) -> Any:
        answer = self._answer(name, arguments or {}, deadline)
        if self._lie is not None and self._lie[0] == name:
            answer = dict(answer) | {self._lie[1]: self._lie[2]} if self._lie[1] else self._lie[2]
        return answer

    def _answer(self, name: str, arguments: Mapping[str, Any], deadline: float) -> Any:
        if name == "routes":
            way = {"source": self.address, "interface": "lan", "gateway": False, "own": False}
            return {target: way for target in arguments["targets"] if target != self.address}
        answer = super().call(name, arguments, deadline)
        if name == "machine":
            entry = {"address": self.address, "prefix": 8, "interface": "lan", "mtu": 1500}
            answer |= {"identity": self.host, "network": {"addresses": [entry], "problem": ""}}
        elif name == "listen":
            # The port is busy for as long as this host needs to notice that it is done.
            assert self._listening.acquire(blocking=False), "it still listens for another host"
            time.sleep(0.2)
            self._listening.release()
        return answer

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Neighbour]:
    """Return the hosts that a test can ask, by name."""
    hosts: dict[str, Neighbour] = {}
    monkeypatch.setattr("launcher.hosts.ssh.visit_host", lambda host: (hosts[host.name], ""))
    return hosts


def ask(hosts: dict[str, Neighbour]) -> tuple[list[FoundMachine], list[str]]:
    candidates = [
        Candidate(Host(name=name, address=one.address), ("address",)) for name, one in hosts.items()
    ]
    found, refused = ask_all(candidates)
    named = [replace(one, host=replace(one.host, name=one.machine.identity)) for one in found]
    return named, [str(one.error) for one in refused]


def three(lie: tuple[str, str, Any] | None = None) -> dict[str, Neighbour]:
    """Return three hosts, of which the second tells a lie."""
    return {
        name: Neighbour(name, f"127.0.9.{number}", lie if name == "second" else None)
        for number, name in enumerate(("first", "second", "third"), 1)
    }


@NUMBERS
@pytest.mark.parametrize(
    ("question", "key"), [("machine", "memory"), ("machine", "cores"), ("free_disk", "")]
)
def test_an_odd_answer_is_that_hosts_fault(
    visits: dict[str, Neighbour], question: str, key: str, odd: float
) -> None:
    visits |= three((question, key, odd))
    found, refused = ask(visits)
    assert [one.name for one in found] == ["first", "third"]
    (line,) = refused
    assert line.startswith(f"host second: {question}: ")


@NUMBERS
@pytest.mark.parametrize(
    ("question", "key"),
    [("routes", "127.0.9.1"), ("connect", "up"), ("connect", "down"), ("connect", "round_trip")],
)
def test_an_odd_rate_is_that_hosts_fault(
    visits: dict[str, Neighbour], question: str, key: str, odd: float
) -> None:
    lie = {"source": "127.0.9.2", "mtu": odd} if question == "routes" else odd
    visits |= three((question, key, lie))
    found, _ = ask(visits)
    links = {(link.source, link.target): link for link in measure_links(found, free_port())}
    assert links["first", "second"].problem.startswith(f"host second: {question}: ")
    assert links["first", "second"].unknown
    assert links["first", "third"].problem == links["second", "third"].problem == ""


def test_a_host_listens_for_one_other_at_a_time(visits: dict[str, Neighbour]) -> None:
    visits |= three()
    found, _ = ask(visits)
    links = measure_links(found, free_port())
    assert [link.problem for link in links] == ["", "", ""]
    assert all(link.rate for link in links)


def test_of_many_hosts_a_bounded_number_stays_connected(visits: dict[str, Neighbour]) -> None:
    visits |= {f"h{n}": Neighbour(f"h{n}", f"127.0.9.{n + 1}") for n in range(AT_ONCE + 9)}
    found, refused = ask(visits)
    assert (len(found), refused) == (AT_ONCE + 9, [])
    assert sum(one.is_open for one in found) == AT_ONCE
    assert [visits[one.name].is_closed for one in found] == [not one.is_open for one in found]
