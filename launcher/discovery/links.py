"""The rates between all pairs of machines, by the agents' own link check (`agent/checks/link.py`).

A round measures pairs of which no two share a machine, so no measurement slows another, unless a
switch or a router between them is slower than its ports.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from launcher.agent.checks.link import ListenResult, ProbeResult, connect, listen
from launcher.agent.operations import find_routes
from launcher.discovery.host_queries import FoundMachine
from launcher.errors import ConfigError
from launcher.hosts.base import Connection
from launcher.hosts.fleet import Answers, ask_each, format_error
from launcher.inventory.facts.network import Route
from launcher.plan.routes import choose_address

_DEADLINE = 8.0
"""Seconds that a pair may take: connecting, and a burst each way."""
_MARGIN = 4.0

T = TypeVar("T")

_FAILURES = {
    "silent": "no answer at {at}; open TCP port {port} in the firewall between them",
    "refused": "{at} refuses the connection; open TCP port {port} in its firewall",
    "unauthenticated": "another program answers at {at}; choose another port: --port",
    "unreachable": "{at}: {detail}",
    "up": "small messages pass, larger ones do not ({detail}): compare the MTU, ip link",
    "down": "small messages pass, larger ones do not ({detail}): compare the MTU, ip link",
}


@dataclass(frozen=True)
class MeasuredLink:
    """The link between two machines. Rates in bit/s, times in s; None: not measured."""

    source: str
    target: str
    forward_rate: float | None = None
    """Rate from `one` to `other`."""
    reverse_rate: float | None = None
    round_trip: float | None = None
    problem: str = ""
    """Why there is no link, or why it is not known; empty if there is one."""
    unknown: bool = False
    """Whether the link was not tried, for the reason in `problem`."""

    @property
    def rate(self) -> float | None:
        """The slower direction."""
        return (
            None
            if self.forward_rate is None or self.reverse_rate is None
            else min(self.forward_rate, self.reverse_rate)
        )

    @property
    def summary(self) -> str:
        """The missing link in one line."""
        what = "the link is not measured" if self.unknown else "no link"
        return f"{what} between {self.source} and {self.target}: {self.problem}"


def pair_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return every pair once, in rounds of pairs without a common name.

    A round-robin tournament: one name stays, the others move on by one place a round.
    """
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found: list[list[tuple[str, str]]] = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        met = [(a, b) for a, b in pairs if a is not None and b is not None]
        found.append([(a, b) if names.index(a) < names.index(b) else (b, a) for a, b in met])
        places.insert(1, places.pop())
    return found


def measure_links(found: Sequence[FoundMachine], port: int) -> list[MeasuredLink]:
    """Return the link of every pair; needs a free TCP port on all machines."""
    if len(found) < 2:
        return []
    machines = {one.name: one for one in found}
    targets = [entry.address for one in found for entry in one.machine.network.addresses]

    def ask_routes(there: Connection) -> dict[str, Route]:
        return there.ask(find_routes.with_deadline(_DEADLINE), targets)

    def ask_machines(
        questions: Mapping[str, Callable[[Connection], T]], deadline: float
    ) -> Answers[T]:
        asked = {name: (machines[name].host, question) for name, question in questions.items()}
        most = max(1, len(asked))  # both ends of a link at once
        return ask_each(asked, deadline, lambda host: machines[host.name].connection, most=most)

    routes = ask_machines(dict.fromkeys(machines, ask_routes), _DEADLINE)
    links: list[MeasuredLink] = []
    for pairs in pair_rounds([*machines]):
        ends: dict[str, Callable[[Connection], ListenResult | ProbeResult]] = {}
        addresses: dict[str, str] = {}
        for a, b in pairs:
            if b in routes.found and (address := _choose_address(machines[a], b, routes.found[b])):
                addresses[a] = address
                target = (address, port, secrets.token_hex(16))
                ends[a], ends[b] = partial(_listen_on, *target, b), partial(_connect_to, *target, b)
        answers = ask_machines(ends, _DEADLINE + 2 * _MARGIN)
        for a, b in pairs:
            if b in routes.errors:
                links.append(_unmeasured_link(a, b, format_error(b, routes.errors[b])))
            elif a not in addresses:
                problem = f"{b} has no route to an address of {a}"
                links.append(MeasuredLink(a, b, problem=problem))
            else:
                links.append(_judge_link(a, b, answers, addresses[a], port))
    order = [*machines]
    return sorted(links, key=lambda link: (order.index(link.source), order.index(link.target)))


def _choose_address(here: FoundMachine, other: str, routes: Mapping[str, Route]) -> str:
    """Return the address of a machine that another one is to connect to; empty without a route."""
    own = {entry.address for entry in here.machine.network.addresses}
    ways = {target: route for target, route in routes.items() if target in own}
    try:
        return choose_address(here.host, here.machine.network, {other: ways}).bind
    except ConfigError:
        return ""


def _listen_on(address: str, port: int, token: str, peer: str, there: Connection) -> ListenResult:
    question = listen.with_deadline(_DEADLINE + _MARGIN)
    return there.ask(question, address, port, token, [peer], _DEADLINE)


def _connect_to(address: str, port: int, token: str, name: str, there: Connection) -> ProbeResult:
    question = connect.with_deadline(_DEADLINE + _MARGIN)
    return there.ask(question, address, port, token, name, _DEADLINE)


def _judge_link(
    one: str, other: str, answers: Answers[ListenResult | ProbeResult], address: str, port: int
) -> MeasuredLink:
    """Return the link by what both of its ends report."""
    if other in answers.errors:
        return _unmeasured_link(one, other, format_error(other, answers.errors[other]))
    crossing, listening = answers.found[other], answers.found.get(one)
    assert isinstance(crossing, ProbeResult)
    if crossing.stage == "done":
        return MeasuredLink(
            one, other, crossing.download_rate, crossing.upload_rate, crossing.round_trip
        )
    if one in answers.errors:
        return _unmeasured_link(one, other, format_error(one, answers.errors[one]))
    if isinstance(listening, ListenResult) and listening.problem:
        return _unmeasured_link(one, other, f"host {one}: {listening.problem}")
    reason = _FAILURES.get(crossing.stage, "{detail}")
    problem = reason.format(at=f"{address}:{port}", port=port, detail=crossing.detail)
    return MeasuredLink(one, other, problem=problem)


def _unmeasured_link(one: str, other: str, problem: str) -> MeasuredLink:
    return MeasuredLink(one, other, problem=problem, unknown=True)
