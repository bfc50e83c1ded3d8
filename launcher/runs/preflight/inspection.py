"""Every check of a start, over all hosts at once: its declaration, and the question to each host.

`launch cluster up` stops if one fails, `launch doctor` shows all. The checks themselves are in
`checks/host.py`, `checks/job.py` and `checks/link.py`, which run on the hosts; docs/checks.md lists
them all with their remedies. A new check is a line of CHECKS (CONTRIBUTING.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from launcher.agent.checks.finding import Finding, Result
from launcher.agent.checks.host import (
    check_devices,
    check_folder,
    check_port,
    check_secure_boot,
    check_sleep,
    check_trainer,
    check_trainer_cuda,
)
from launcher.agent.checks.job import check_model_folder, check_text
from launcher.agent.checks.share import check_share
from launcher.agent.operation import CHECK_DEADLINE
from launcher.agent.operations import read_clock
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import RECIPE
from launcher.hosts.survey import Survey
from launcher.plan.plan import LaunchPlan
from launcher.runs.preflight import distill, finetune
from launcher.runs.preflight.examination import Asked, Check, Examination
from launcher.runs.preflight.probe import Probe, examine
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig

DRIFT = 2.0
"""Seconds that a clock may be off without a warning: beyond, logs of hosts do not line up."""
GREATEST_DRIFT = 60.0
"""Seconds beyond which certificates of this minute may not be valid yet on that host."""

_LEAST_STATE_SPACE = 64 << 20
_ROUNDS = 3


def inspect(
    found: Survey,
    plan: LaunchPlan | None,
    job: RunConfig | DistillJob | None,
    only: Collection[str] | None = None,
) -> list[Result]:
    """Run every check of the hosts of a plan; without a plan, only those of the hosts.

    An unreachable host is one failed check; the others are still checked.

    Args:
        only: the names of the checks to run; None: all.
    """
    failed = [
        Result(_kind(error), name, "fail", str(error), "; ".join(error.details))
        for name, error in found.failures.items()
    ]
    names = [host.name for host in found.hosts if host.name in found.machines]
    if plan is not None:
        taking_part = {host.name for host in plan.hosts}
        names = [name for name in names if name in taking_part]
    wanted = probes(Examination(found, names, plan, job))
    checks = failed + examine([each for each in wanted if only is None or each.name in only])
    order = {name: index for index, name in enumerate(host.name for host in found.hosts)}
    places = {check.name: index for index, check in enumerate(CHECKS)}
    return sorted(checks, key=lambda c: (order.get(c.host, len(order)), places[c.name]))


def probes(cluster: Examination) -> list[Probe]:
    """Return the probe of every check that applies to a host."""
    return [
        probe
        for check in CHECKS
        if cluster.concerns(check.kind)
        for name in cluster.asked(check.kind)
        for probe in check.probes(cluster, name)
    ]


def _kind(error: LauncherError) -> str:
    """Return the failed check of a host that could not be checked further."""
    if "host key" in str(error).lower():
        return "host key"
    return "version" if "launch cluster push" in str(error) else "reachable"


def _here(find: Callable[[Connection], Finding]) -> Callable[[Examination, str], Asked]:
    """Ask what the launcher itself finds out about a connection, of remote hosts."""

    def probe(cluster: Examination, name: str) -> Asked:
        if not cluster.host(name).is_local:
            yield partial(find, cluster.connection(name)), CHECK_DEADLINE

    return probe


def _known(finding: Finding) -> tuple[Callable[[], Finding], float]:
    return lambda: finding, CHECK_DEADLINE


def check_reachable(connection: Connection) -> Finding:
    """Return as whom and how processes are started on a host, and its round trip."""
    how = "systemd units" if connection.units else "plain sessions"
    began = time.monotonic()
    connection.ask(read_clock)
    trip = 1e3 * (time.monotonic() - began)
    detail = f"as {connection.user}, {how}, {trip:.0f} ms"
    if connection.units_refusal:
        return Finding(
            "warn",
            f"{detail}; sudo refuses motley-unit: {connection.units_refusal}",
            f"{RECIPE} --tags trainer: it names the rule that is missing or comes too late",
        )
    return Finding("ok", detail)


def _host_key(_connection: Connection) -> Finding:
    return Finding("ok", "matches the known one")  # else there would be no connection


def check_login_shell(connection: Connection) -> Finding:
    """Return whether a host's login shell prints, which rsync takes for its own protocol."""
    if not connection.noise:
        return Finding("ok", "prints nothing")
    return Finding(
        "warn",
        f"its start-up file prints {connection.noise[0]!r:.60}; launch sync and rsync need silence",
        "print for a terminal alone, in ~/.bashrc: [ -t 1 ] && echo ...",
    )


def _skew(cluster: Examination, name: str, check: str) -> Asked:
    for each in cluster.skew:
        if (each.host, each.name) == (name, check):
            yield _known(Finding(each.status, each.detail, each.remedy))


def check_clock(connection: Connection, clock: Callable[[], float] = time.time) -> Finding:
    """Return the offset of a host's clock from this one, less the time of the request."""
    best: tuple[float, float] | None = None
    for _ in range(_ROUNDS):
        before = clock()
        there = connection.ask(read_clock)
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


def _program(cluster: Examination, name: str) -> tuple[str, bool]:
    """Return the program of a host's trainer, and whether it is that of its agent."""
    own = cluster.plan.host(name).trainer_command is None
    return cluster.processes(name)[0].argv[0], own


def _trainer(cluster: Examination, name: str) -> Asked:
    trains = any(process.device for process in cluster.processes(name))
    yield cluster.ask(name, check_trainer, *_program(cluster, name), trains)


def _devices(cluster: Examination, name: str) -> Asked:
    found = cluster.found
    spare = [f"{d.backend} {d.id} ({d.name})" for d in found.spare.get(name, ())]
    used = [device for process in cluster.processes(name) for device in process.devices]
    yield _known(check_devices(used, found.problems.get(name, ()), spare))


def _cards(cluster: Examination, name: str) -> Asked:
    cuda = [process for process in cluster.processes(name) if process.backend == "cuda"]
    cards = sorted({device for process in cuda for device in process.devices})
    if cards and not cluster.found.problems.get(name):
        yield cluster.ask(name, check_trainer_cuda, *_program(cluster, name), cards)


def _secure_boot(cluster: Examination, name: str) -> Asked:
    broken = bool(cluster.found.problems.get(name))
    devices = cluster.host(name).devices or ()
    if broken or any(device.backend == "cuda" for device in devices):
        yield cluster.ask(name, check_secure_boot, broken)


def _sleep(cluster: Examination, name: str) -> Asked:
    if not cluster.host(name).is_local:
        yield cluster.ask(name, check_sleep)


def _state(cluster: Examination, name: str) -> Asked:
    yield cluster.ask(name, check_folder, cluster.state_folder(name), _LEAST_STATE_SPACE)


def _share(cluster: Examination, name: str) -> Asked:
    folder = cluster.host(name).share_folder
    if folder is not None:
        yield cluster.ask(name, check_share, folder)


def _port(cluster: Examination, name: str) -> Asked:
    plan, trial = cluster.plan, cluster.link
    if name == cluster.head and trial is not None:
        yield trial.listen, trial.deadline  # while the other hosts connect
    elif name == cluster.head and plan.port is not None:
        yield cluster.ask(name, check_port, plan.bind_address, plan.port)


def _links(cluster: Examination, name: str) -> Asked:
    if cluster.link is not None and name in cluster.link.far:
        yield partial(cluster.link.connect, name), cluster.link.deadline


def _mtu(cluster: Examination, name: str) -> Asked:
    """Compare the route's MTU with that of the coordinator's interface."""
    head = cluster.head
    route = cluster.found.ways.get(name)
    addresses = cluster.found.machines[head].network.addresses
    there = next((a for a in addresses if a.address == cluster.plan.bind_address), None)
    if route is None or route.mtu is None or there is None:
        return
    detail = f"{route.mtu} on {route.interface}"
    if route.mtu == there.mtu:
        yield _known(Finding("ok", detail))
        return
    remedy = "set the same on both, or the one of the switch between them: ip link set DEV mtu N"
    detail = f"{detail}, {there.mtu} on {there.interface} of {head}"
    yield _known(Finding("warn", detail, remedy))


CHECKS = (
    Check("reachable", "host", _here(check_reachable)),
    Check("host key", "host", _here(_host_key)),
    Check("login shell", "host", _here(check_login_shell)),
    Check("version", "host", partial(_skew, check="version")),
    Check("python", "host", partial(_skew, check="python")),
    Check("libraries", "host", partial(_skew, check="libraries")),
    Check("clock", "host", _here(check_clock)),
    Check("trainer", "plan", _trainer),
    Check("devices", "plan", _devices),
    Check("cuda", "plan", _cards),
    Check("secure boot", "host", _secure_boot),
    Check("sleep", "host", _sleep),
    Check("state", "plan", _state),
    Check("share", "host", _share),
    *finetune.INPUTS,
    Check("model", "distillation", distill.files("model", check_model_folder)),
    Check("data", "distillation", distill.files("data", check_text)),
    Check("validation", "distillation", distill.held_out),
    Check("output", "training", finetune.output),
    Check("output", "distillation", distill.output),
    Check("logits", "distillation", distill.folders("logits")),
    Check("checkpoints", "training", finetune.checkpoints),
    Check("checkpoints", "distillation", distill.folders("checkpoints")),
    Check("unit", "training", finetune.units),
    Check("unit", "distillation", distill.units),
    Check("memory", "training", finetune.memory),
    Check("port", "plan", _port),
    Check("link", "plan", _links),
    Check("mtu", "plan", _mtu),
    Check("plan", "plan", lambda _cluster, _name: ()),  # of the cluster: `launch doctor`
)
"""Every check, in the order in which a host's are shown."""
INPUT_CHECKS = ("model", "data", "validation")
"""Those of what a run reads."""
