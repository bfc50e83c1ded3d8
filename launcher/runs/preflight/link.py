"""The link check as the launcher runs it: which host listens, which connect, and the findings."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from launcher.agent.checks.finding import Finding
from launcher.agent.checks.link import ListenResult, ProbeResult, connect, listen
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.inventory.facts.network import format_speed
from launcher.plan.plan import LaunchPlan

SLOW = 100e6
"""bit/s below which a link is reported as slow: a 5 MB gradient takes half a second there."""

_PATIENCE = 6.0
"""Seconds that a worker may take to connect."""
_PER_PEER = 1.5
"""Seconds more for each worker: they measure one after the other."""
_MARGIN = 3.0


class LinkTrial:
    """Both ends of every link between the coordinator and workers on other machines."""

    def __init__(self, plan: LaunchPlan, far: Sequence[str]) -> None:
        """Take the hosts that reach the coordinator over a network; at least one."""
        self._plan = plan
        self.far = tuple(far)
        self._token = secrets.token_hex(16)
        self._deadline = _PATIENCE + _PER_PEER * len(far)
        self.deadline = self._deadline + 2 * _MARGIN
        """Seconds that each end may take in all."""
        self._listened = threading.Event()
        self._listening = ListenResult("the coordinator's listener did not answer")

    def listen(self, there: Connection) -> Finding:
        """Return the coordinator's `port`; at the same time every host has to connect."""
        address, port = self._plan.bind_address, self._plan.port
        assert port is not None
        question = listen.with_deadline(self._deadline + _MARGIN)
        try:
            self._listening = there.ask(
                question, address, port, self._token, self.far, self._deadline
            )
        except (LauncherError, OSError) as error:
            self._listening = ListenResult(str(error))
        finally:
            self._listened.set()
        if self._listening.problem:
            return Finding("fail", self._listening.problem, self._listening.remedy)
        return Finding("ok", f"{port} on {address} is free")

    def connect(self, host: str, there: Connection) -> Finding:
        """Return a host's `link`."""
        target = next(w.address for w in self._plan.workers if w.host == host)
        address, _, port = target.rpartition(":")
        question = connect.with_deadline(self._deadline + _MARGIN)
        crossing = there.ask(
            question, address.strip("[]"), int(port), self._token, host, self._deadline
        )
        if crossing.stage == "done":
            return judge_crossing(crossing, host, target, self._plan, connected=True)
        # Only the coordinator's end knows whether it could listen.
        self._listened.wait(self._deadline + _MARGIN)
        if self._listening.problem:
            head = self._plan.leader.host
            detail = f"not tested: {head} could not listen on {target}"
            return Finding("warn", detail, f"see the check `port` of {head}")
        return judge_crossing(crossing, host, target, self._plan, host in self._listening.connected)


def judge_crossing(
    crossing: ProbeResult, host: str, target: str, plan: LaunchPlan, connected: bool
) -> Finding:
    """Return the finding of a crossing: the failed direction and the remedy."""
    head = plan.leader.host
    open_port = (
        f"open TCP port {plan.port} on {head} for {host} (the trainer role does it; by hand: "
        f"nft or ufw allow), or choose another route with motley_connect_address on {host}"
    )
    if crossing.stage in ("up", "down"):
        way = f"{host} -> {head}" if crossing.stage == "up" else f"{head} -> {host}"
        return Finding(
            "fail",
            f"small messages pass, larger ones from {way} do not ({crossing.detail})",
            f"a wrong MTU on that route is likely; compare: ip link, tracepath {target}",
        )
    if crossing.stage == "silent":
        way = f"{head} -> {host}: its answers are lost" if connected else f"{host} -> {head}"
        return Finding("fail", f"no connection to {target}, {way}", open_port)
    if crossing.stage == "refused":
        return Finding(
            "fail",
            f"{target} refuses connections from {host}, though {head} listens there",
            f"a firewall rejects it, or {target} is another machine: {open_port}",
        )
    if crossing.stage == "unauthenticated":
        return Finding(
            "fail",
            f"{target} is not {head}: {crossing.detail}",
            f"set motley_bind_address on {head} or motley_connect_address on {host}",
        )
    if crossing.stage == "unreachable":
        return Finding(
            "fail",
            f"{host} has no route to {target}: {crossing.detail}",
            f"set motley_bind_address on {head} to an address on the network of {host}",
        )
    if crossing.upload_rate is None or crossing.download_rate is None:
        return Finding("ok", f"{target} is reachable; too many hosts at once to measure its speed")
    detail = (
        f"{format_speed(crossing.upload_rate)} to the coordinator, "
        f"{format_speed(crossing.download_rate)} back, "
        f"{1e3 * (crossing.round_trip or 0):.1f} ms"
    )
    if min(crossing.upload_rate, crossing.download_rate) < SLOW:
        return Finding(
            "warn", f"{detail}: slow", "use a cable, or send less: --set exchange.codec=int8"
        )
    return Finding("ok", detail)
