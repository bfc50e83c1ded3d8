"""The rates between all pairs of machines, by the agents' own link check (`agent/checks/link.py`).

A round measures pairs of which no two share a machine, so no measurement slows another, unless a
switch or a router between them is slower than its ports.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.agent.checks import link as link_check
from launcher.agent.checks.link import Listening
from launcher.agent.operations import find_routes
from launcher.discovery.asking import Found
from launcher.errors import ConfigError, LauncherError, PreflightError
from launcher.hosts.fleet import at_once, line_of
from launcher.inventory.facts.network import Route
from launcher.plan.routes import choose

_DEADLINE = 8.0
"""Seconds that a pair may take: connecting, and a burst each way."""
_MARGIN = 4.0

_FAILURES = {
    "silent": "no answer at {at}; open TCP port {port} in the firewall between them",
    "refused": "{at} refuses the connection; open TCP port {port} in its firewall",
    "stranger": "another program answers at {at}; choose another port: --port",
    "unreachable": "{at}: {detail}",
    "up": "small messages pass, larger ones do not ({detail}): compare the MTU, ip link",
    "down": "small messages pass, larger ones do not ({detail}): compare the MTU, ip link",
}


@dataclass(frozen=True)
class MeasuredLink:
    """The link between two machines. Rates in bit/s, times in s; None: not measured."""

    one: str
    other: str
    forth: float | None = None
    """Rate from `one` to `other`."""
    back: float | None = None
    round_trip: float | None = None
    problem: str = ""
    """Why there is no link, or why it is not known; empty if there is one."""
    unknown: bool = False
    """Whether the link was not tried, for the reason in `problem`."""

    @property
    def rate(self) -> float | None:
        """The slower direction."""
        return None if self.forth is None or self.back is None else min(self.forth, self.back)

    @property
    def line(self) -> str:
        """The missing link in one line."""
        what = "the link is not measured" if self.unknown else "no link"
        return f"{what} between {self.one} and {self.other}: {self.problem}"


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
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


def measure(found: Sequence[Found], port: int) -> list[MeasuredLink]:
    """Return the link of every pair; needs a free TCP port on all machines."""
    if len(found) < 2:
        return []
    machines = {one.name: one for one in found}
    targets = [entry.address for one in found for entry in one.machine.network.addresses]
    asked = {one.name: partial(_find_routes, one, targets) for one in found}
    routes = at_once(asked, _DEADLINE)
    links: dict[tuple[str, str], MeasuredLink] = {}
    for pairs in rounds([one.name for one in found]):
        tasks = {
            f"{a}\0{b}": partial(_cross, machines[a], machines[b], routes.found[b], port)
            for a, b in pairs
            if b in routes.found
        }
        answers = at_once(tasks, _DEADLINE + 2 * _MARGIN)
        for a, b in pairs:
            late = f"no answer within {_DEADLINE + 2 * _MARGIN:.0f} s"
            why = line_of(b, routes.errors[b]) if b in routes.errors else late
            lost = MeasuredLink(a, b, problem=why, unknown=True)
            links[a, b] = answers.found.get(f"{a}\0{b}", lost)
    order = [one.name for one in found]
    return sorted(links.values(), key=lambda link: (order.index(link.one), order.index(link.other)))


def _find_routes(one: Found, targets: Sequence[str]) -> dict[str, Route]:
    return one.connection.ask(find_routes.within(_DEADLINE), targets)


def _cross(here: Found, there: Found, routes: Mapping[str, Route], port: int) -> MeasuredLink:
    """Let one machine listen and the other connect, and return the link."""
    link = partial(MeasuredLink, here.name, there.name)
    own = {entry.address for entry in here.machine.network.addresses}
    ways = {target: route for target, route in routes.items() if target in own}
    try:
        address = choose(here.host, here.machine.network, {there.name: ways}).bind
    except ConfigError:
        return link(problem=f"{there.name} has no route to an address of {here.name}")
    target: dict[str, Any] = {"address": address, "port": port, "deadline": _DEADLINE}
    target["token"] = secrets.token_hex(16)
    listening: list[Listening] = []

    def listen() -> None:
        try:
            question = link_check.listen.within(_DEADLINE + _MARGIN)
            listening.append(here.connection.ask(question, **target, peers=[there.name]))
        except (LauncherError, OSError) as error:
            listening.append(Listening(str(error)))

    waiting = threading.Thread(target=listen, daemon=True)
    waiting.start()
    try:
        question = link_check.connect.within(_DEADLINE + _MARGIN)
        crossing = there.connection.ask(question, **target, name=there.name)
    except (LauncherError, OSError) as error:
        return link(problem=line_of(there.name, PreflightError(str(error))), unknown=True)
    finally:
        waiting.join(_DEADLINE + _MARGIN)  # the next round listens at that port again
    if crossing.stage == "done":
        return link(crossing.down, crossing.up, crossing.round_trip)
    if listening and listening[0].problem:
        return link(problem=line_of(here.name, PreflightError(listening[0].problem)), unknown=True)
    at = f"{address}:{port}"
    reason = _FAILURES.get(crossing.stage, "{detail}")
    return link(problem=reason.format(at=at, port=port, detail=crossing.detail))
