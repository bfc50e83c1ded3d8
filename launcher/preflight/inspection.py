"""Every check of a start, over all hosts at once: the list, and the question to each host.

`launch cluster up` stops if one fails, `launch doctor` shows all. What a check does is in
`checks/host.py`, `checks/job.py` and `checks/link.py`, which run on the hosts; docs/checks.md
lists them all with what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from launcher.checks.finding import Check, Finding
from launcher.checks.host import CUDA_DEADLINE, check_devices
from launcher.errors import LauncherError
from launcher.facts import machine
from launcher.hosts.base import Connection
from launcher.plan.plan import LaunchPlan
from launcher.preflight.distill import distill_probes
from launcher.preflight.finetune import job_probes, state_folder
from launcher.preflight.link import LinkTrial
from launcher.preflight.probe import Probe, examine, question_probe
from launcher.preflight.survey import Survey
from launcher.preflight.versions import compare
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig

CHECKS = (
    "reachable",
    "host key",
    "version",
    "python",
    "libraries",
    "clock",
    "trainer",
    "devices",
    "cuda",
    "secure boot",
    "sleep",
    "state",
    "share",
    "model",
    "data",
    "validation",
    "output",
    "logits",
    "checkpoints",
    "unit",
    "memory",
    "port",
    "link",
    "mtu",
    "plan",
)
"""Every check, in the order in which a host's are shown."""

DRIFT = 2.0
"""Seconds that a clock may be off without a warning: beyond, logs of hosts do not line up."""
GREATEST_DRIFT = 60.0
"""Seconds beyond which certificates of this minute may not be valid yet on that host."""

SHARE_DEADLINE = 5.0
"""Seconds for the share: an unreachable file server never answers."""

_LEAST_STATE_SPACE = 64 << 20
_ROUNDS = 3


def inspect(
    found: Survey, plan: LaunchPlan | None, job: RunConfig | DistillJob | None
) -> list[Check]:
    """Run every check of the hosts of a plan, or, without one, of the hosts alone.

    An unreachable host is one failed check; the others are still checked.
    """
    checks = [
        Check(_kind(error), name, "fail", str(error), "; ".join(error.details))
        for name, error in found.failures.items()
    ]
    names = [host.name for host in found.hosts if host.name in found.machines]
    if plan is not None:
        taking_part = {host.name for host in plan.hosts}
        names = [name for name in names if name in taking_part]
    machines = {name: found.machines[name] for name in names}
    if any(not host.is_local for host in found.hosts) or len(set(found.identities.values())) > 1:
        head = plan.leader.host if plan is not None else ""
        checks += compare(machines, machine.describe(), head)
    probes = [probe for name in names for probe in _host_probes(name, found)]
    if plan is not None:
        probes += _plan_probes(plan, found, names)
        if isinstance(job, DistillJob):
            probes += distill_probes(plan, found, names)
        elif job is not None:
            probes += job_probes(plan, job, found, names)
    checks += examine(probes)
    order = {name: index for index, name in enumerate(host.name for host in found.hosts)}
    return sorted(checks, key=lambda c: (order.get(c.host, len(order)), CHECKS.index(c.name)))


def _kind(error: LauncherError) -> str:
    """Return the failed check of a host that could not be checked further."""
    if "host key" in str(error).lower():
        return "host key"
    return "version" if "launch cluster push" in str(error) else "reachable"


def _host_probes(name: str, found: Survey) -> list[Probe]:
    """Return the checks of a host that do not depend on the plan."""
    host = next(host for host in found.hosts if host.name == name)
    connection = found.connections[name]
    broken = bool(found.problems.get(name))
    probes: list[Probe] = []
    if not host.is_local:
        probes += [
            Probe("reachable", name, partial(_reachable, connection)),
            Probe("host key", name, partial(_known, Finding("ok", "matches the known one"))),
            Probe("clock", name, partial(check_clock, connection)),
            question_probe("sleep", name, connection, "sleep", {}),
        ]
    if broken or any(device.backend == "cuda" for device in host.devices or ()):
        boot = {"broken": broken}
        probes.append(question_probe("secure boot", name, connection, "secure_boot", boot))
    if host.share_folder is not None:
        share = {"path": host.share_folder}
        probes.append(question_probe("share", name, connection, "share", share, SHARE_DEADLINE))
    return probes


def _plan_probes(plan: LaunchPlan, found: Survey, names: Sequence[str]) -> list[Probe]:
    """Return the checks of the hosts that depend on the plan."""
    probes: list[Probe] = []
    for name in names:
        connection = found.connections[name]
        own = next(process for process in plan.processes if process.host == name)
        computing = [p for p in plan.processes if p.host == name and p.device]
        program = {"program": own.argv[0], "own": plan.host(name).trainer_command is None}
        trains = {**program, "trains": bool(computing)}
        spare = [f"{d.backend} {d.id} ({d.name})" for d in found.spare.get(name, ())]
        problems = found.problems.get(name, ())
        devices = check_devices([p.device for p in computing], problems, spare)
        state = {"path": state_folder(plan, name), "least": _LEAST_STATE_SPACE}
        probes += [
            question_probe("trainer", name, connection, "trainer", trains),
            Probe("devices", name, partial(_known, devices)),
            question_probe("state", name, connection, "folder", state),
        ]
        cards = sorted({p.device for p in computing if p.backend == "cuda"})
        if cards and devices.status == "ok":
            asked = {**program, "cards": cards}
            probes.append(question_probe("cuda", name, connection, "cuda", asked, CUDA_DEADLINE))
        if (mtu := _mtu_finding(plan, found, name)) is not None:
            probes.append(Probe("mtu", name, partial(_known, mtu)))
    return [*probes, *_link_probes(plan, found, names)]


def _link_probes(plan: LaunchPlan, found: Survey, names: Sequence[str]) -> list[Probe]:
    """Return the checks of the coordinator's port; a run without sockets has none."""
    head = plan.leader.host
    if plan.port is None or head not in names:
        return []
    here = found.machines[head].identity
    far = [n for n in names if n != head and found.machines[n].identity != here]
    if far:
        return LinkTrial(plan, found.connections, far).probes()
    listening = {"address": plan.bind_address, "port": plan.port}
    return [question_probe("port", head, found.connections[head], "port", listening)]


def _reachable(connection: Connection) -> Finding:
    how = "systemd units" if connection.units else "plain sessions"
    began = time.monotonic()
    connection.ask("clock", {})
    trip = 1e3 * (time.monotonic() - began)
    return Finding("ok", f"as {connection.user}, {how}, {trip:.0f} ms")


def check_clock(connection: Connection, clock: Callable[[], float] = time.time) -> Finding:
    """Return the offset of a host's clock from this one, less the time of the request."""
    best: tuple[float, float] | None = None
    for _ in range(_ROUNDS):
        before = clock()
        there = float(connection.ask("clock", {}))
        after = clock()
        sample = after - before, there - (before + after) / 2
        best = sample if best is None else min(best, sample)
    assert best is not None
    trip, offset = best
    detail = f"{offset:+.2f} s (within {trip / 2:.2f} s)"
    remedy = "synchronise it: timedatectl set-ntp true (the base role installs a time service)"
    if abs(offset) - trip / 2 > GREATEST_DRIFT:
        return Finding("fail", f"{detail}: certificates are not valid there", remedy)
    if abs(offset) - trip / 2 > DRIFT:
        return Finding("warn", detail, remedy)
    return Finding("ok", detail)


def _mtu_finding(plan: LaunchPlan, found: Survey, name: str) -> Finding | None:
    """Compare the route's MTU with that of the coordinator's interface."""
    route = found.ways.get(name)
    addresses = found.machines[plan.leader.host].network.addresses
    there = next((a for a in addresses if a.address == plan.bind_address), None)
    if route is None or route.mtu is None or there is None:
        return None
    if route.mtu == there.mtu:
        return Finding("ok", f"{route.mtu} on {route.interface}")
    return Finding(
        "warn",
        f"{route.mtu} on {route.interface}, {there.mtu} on {there.interface} of {plan.leader.host}",
        "set the same on both, or the one of the switch between them: ip link set DEV mtu N",
    )


def _known(finding: Finding) -> Finding:
    return finding
