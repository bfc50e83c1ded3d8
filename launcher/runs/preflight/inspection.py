"""Every check of a start, over all hosts at once: its declaration, and the question to each host.

`launch cluster up` stops if one fails, `launch doctor` shows all. The checks themselves are in
`checks/host.py`, `checks/job.py`, `checks/memory.py` and `checks/link.py`, which run on the hosts.
The table of docs/checks.md is generated from CHECKS. A new check is a row there (CONTRIBUTING.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
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
from launcher.agent.checks.shared_folder import check_share
from launcher.agent.operation import CHECK_DEADLINE
from launcher.agent.operations import read_clock
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import RECIPE
from launcher.hosts.clock_offset import measure_clock_offset
from launcher.hosts.survey import Survey
from launcher.plan.plan import LaunchPlan
from launcher.runs.preflight import distill, finetune
from launcher.runs.preflight.check import (
    Check,
    CheckContext,
    Question,
    host_question,
    known_question,
    run_checks,
)
from launcher.runs.preflight.versions import UPDATE
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.config.script import Script

DRIFT = 2.0
"""Seconds that a clock may be off without a warning: beyond, logs of hosts do not line up."""
GREATEST_DRIFT = 60.0
"""Seconds beyond which certificates of this minute may not be valid yet on that host."""

_LEAST_STATE_SPACE = 64 << 20


def inspect_hosts(
    found: Survey,
    plan: LaunchPlan | None,
    job: RunConfig | DistillJob | None,
    only: Collection[str] | None = None,
    script: Script | None = None,
) -> list[Result]:
    """Run every check of the hosts of a plan; without a plan, only those of the hosts.

    An unreachable host is one failed check; the others are still checked.

    Args:
        only: the names of the checks to run; None: all.
        script: of the run.
    """
    failed = [
        Result(_failed_check_kind(error), name, "fail", str(error), "; ".join(error.details))
        for name, error in found.failures.items()
    ]
    names = [host.name for host in found.hosts if host.name in found.machines]
    if plan is not None:
        taking_part = {host.name for host in plan.hosts}
        names = [name for name in names if name in taking_part]
    context = CheckContext(found, names, plan, job, script)
    wanted = [
        each
        for check in CHECKS
        if only is None or check.name in only
        for each in check.of_hosts(context)
    ]
    checks = failed + run_checks(wanted, found.connections)
    order = {name: index for index, name in enumerate(host.name for host in found.hosts)}
    places = {check.name: index for index, check in enumerate(CHECKS)}
    return sorted(checks, key=lambda c: (order.get(c.host, len(order)), places[c.name]))


def _failed_check_kind(error: LauncherError) -> str:
    """Return the failed check of a host that could not be checked further."""
    if "host key" in str(error).lower():
        return "host key"
    return "version" if "launch cluster push" in str(error) else "reachable"


def _on_launcher(
    find: Callable[[Connection], Finding],
) -> Callable[[CheckContext, str], Iterator[Question]]:
    """Return a probe that the launcher answers itself, from its connection to a host."""

    def probe(cluster: CheckContext, name: str) -> Iterator[Question]:
        if not cluster.find_host(name).is_local:
            yield find, CHECK_DEADLINE

    return probe


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
    first = f"{connection.noise[0]!r:.60}"
    return Finding("warn", f"its start-up file prints {first}, which breaks launch sync and rsync")


def _probe_versions(cluster: CheckContext, name: str, check: str) -> Iterator[Question]:
    for each in cluster.version_results:
        if (each.host, each.name) == (name, check):
            yield known_question(Finding(each.status, each.detail, each.remedy))


def check_clock(connection: Connection, clock: Callable[[], float] = time.time) -> Finding:
    """Return the offset of a host's clock from this one, less the time of the request."""
    uncertainty, offset = measure_clock_offset(partial(connection.ask, read_clock), clock)
    detail = f"{offset:+.2f} s (within {uncertainty:.2f} s)"
    if abs(offset) - uncertainty > GREATEST_DRIFT:
        return Finding("fail", f"{detail}: certificates are not valid there")
    if abs(offset) - uncertainty > DRIFT:
        return Finding("warn", detail)
    return Finding("ok", detail)


def _trainer_program(cluster: CheckContext, name: str) -> tuple[str, bool]:
    """Return the program of a host's trainer, and whether it is that of its agent."""
    own = cluster.plan.get_host(name).trainer_command is None
    return cluster.list_processes(name)[0].argv[0], own


def _probe_trainer(cluster: CheckContext, name: str) -> Iterator[Question]:
    trains = any(process.device for process in cluster.list_processes(name))
    imports = cluster.script.imports if cluster.script else []
    yield host_question(check_trainer, *_trainer_program(cluster, name), trains, imports)


def _probe_devices(cluster: CheckContext, name: str) -> Iterator[Question]:
    found = cluster.found
    spare = [f"{d.backend} {d.id} ({d.name})" for d in found.spare.get(name, ())]
    used = [device for process in cluster.list_processes(name) for device in process.devices]
    yield known_question(check_devices(used, found.problems.get(name, ()), spare))


def _probe_gpus(cluster: CheckContext, name: str) -> Iterator[Question]:
    cuda = [process for process in cluster.list_processes(name) if process.backend == "cuda"]
    cards = sorted({device for process in cuda for device in process.devices})
    if cards and not cluster.found.problems.get(name):
        yield host_question(check_trainer_cuda, *_trainer_program(cluster, name), cards)


def _secure_boot(cluster: CheckContext, name: str) -> Iterator[Question]:
    broken = bool(cluster.found.problems.get(name))
    devices = cluster.find_host(name).devices or ()
    if broken or any(device.backend == "cuda" for device in devices):
        yield host_question(check_secure_boot, broken)


def _probe_sleep(cluster: CheckContext, name: str) -> Iterator[Question]:
    if not cluster.find_host(name).is_local:
        yield host_question(check_sleep)


def _probe_state_folder(cluster: CheckContext, name: str) -> Iterator[Question]:
    yield host_question(check_folder, cluster.state_folder(name), _LEAST_STATE_SPACE)


def _probe_shared_folder(cluster: CheckContext, name: str) -> Iterator[Question]:
    folder = cluster.find_host(name).share_folder
    if folder is not None:
        yield host_question(check_share, folder)


def _probe_port(cluster: CheckContext, name: str) -> Iterator[Question]:
    plan, trial = cluster.plan, cluster.link_trial
    if name == cluster.leader_host and trial is not None:
        yield trial.listen, trial.deadline  # while the other hosts connect
    elif name == cluster.leader_host and plan.port is not None:
        yield host_question(check_port, plan.bind_address, plan.port)


def _probe_links(cluster: CheckContext, name: str) -> Iterator[Question]:
    if cluster.link_trial is not None and name in cluster.link_trial.far:
        yield partial(cluster.link_trial.connect, name), cluster.link_trial.deadline


def _probe_mtu(cluster: CheckContext, name: str) -> Iterator[Question]:
    """Compare the route's MTU with that of the coordinator's interface."""
    head = cluster.leader_host
    route = cluster.found.ways.get(name)
    addresses = cluster.found.machines[head].network.addresses
    there = next((a for a in addresses if a.address == cluster.plan.bind_address), None)
    if route is None or route.mtu is None or there is None:
        return
    detail = f"{route.mtu} on {route.interface}"
    if route.mtu == there.mtu:
        yield known_question(Finding("ok", detail))
        return
    yield known_question(Finding("warn", f"{detail}, {there.mtu} on {there.interface} of {head}"))


CHECKS = (
    Check(
        "reachable",
        "SSH hosts",
        "SSH, the login, sudo to the run user or the agent fails; warns: no sudo for `motley-unit`",
        "",
        {"host": _on_launcher(check_reachable)},
    ),
    Check(
        "host key",
        "SSH hosts",
        "the key is not known yet, has changed or was revoked",
        "compare it at the host's console; for a new key: `--accept-new-host-keys`",
        {"host": _on_launcher(_host_key)},
    ),
    Check(
        "login shell",
        "SSH hosts",
        "warns: a start-up file of the login shell prints, which breaks `launch sync`",
        "print on a terminal only, in ~/.bashrc: `[ -t 1 ] && echo ...`",
        {"host": _on_launcher(check_login_shell)},
    ),
    Check(
        "version",
        "hosts",
        "the code differs from the launcher's; such a host skips all checks of the job",
        UPDATE,
        {"host": partial(_probe_versions, check="version")},
    ),
    Check(
        "python",
        "hosts",
        "warns: another release than the coordinator's",
        "nothing, or install the same distribution on all hosts",
        {"host": partial(_probe_versions, check="python")},
    ),
    Check(
        "libraries",
        "hosts",
        "warns: another release of numpy, torch, transformers, peft, safetensors or tokenizers",
        UPDATE,
        {"host": partial(_probe_versions, check="libraries")},
    ),
    Check(
        "clock",
        "SSH hosts",
        f"warns above {DRIFT:.0f} s, fails above {GREATEST_DRIFT:.0f} s of offset to the launcher",
        "`timedatectl set-ntp true` (the base role installs a time service)",
        {"host": _on_launcher(check_clock)},
    ),
    Check(
        "trainer",
        "hosts",
        "the trainer's command or a module is missing, or a package that the script imports",
        "run the recipe, or `pip install 'motley[trainer]'`",
        {"plan": _probe_trainer},
    ),
    Check(
        "devices",
        "hosts",
        "the run user cannot use a device, or the inventory names one that does not exist",
        "repair its driver, or list the devices: `motley_devices`",
        {"plan": _probe_devices},
    ),
    Check(
        "cuda",
        "hosts with CUDA workers",
        "torch cannot compute on every planned card",
        "install torch for CUDA",
        {"plan": _probe_gpus},
    ),
    Check(
        "secure boot",
        "hosts with NVIDIA cards",
        "warns: Secure Boot is on and a card does not work",
        "enrol the module's key with `mokutil`, or use signed modules",
        {"host": _secure_boot},
    ),
    Check(
        "sleep",
        "SSH hosts",
        "warns: a desktop session is running and may suspend the host",
        "`sudo systemctl mask sleep.target suspend.target hibernate.target`",
        {"host": _probe_sleep},
    ),
    Check(
        "state",
        "hosts",
        "the folder of runs is not writable, or has less than 64 MiB",
        "free space, or `motley_state_folder`",
        {"plan": _probe_state_folder},
    ),
    Check(
        "share",
        "hosts with `motley_share_folder`",
        "it is not mounted, not writable, or does not answer",
        "",
        {"host": _probe_shared_folder},
    ),
    Check(
        "model",
        "hosts that take part",
        "it is missing, incomplete, unknown, or not the coordinator's; warns before a download",
        "`launch sync inputs`, or `--model DIR`",
        {
            "training": finetune.model,
            "distillation": distill.files_probe("model", check_model_folder),
        },
    ),
    Check(
        "data",
        "hosts that take part",
        "it is missing, unknown, of another task, or not the coordinator's; logits are incomplete",
        "`launch sync inputs`, or `--data FILE`",
        {"training": finetune.data, "distillation": distill.files_probe("data", check_text)},
    ),
    Check(
        "validation",
        "hosts that take part",
        "as `data`",
        "`--set data.validation=FILE`, or `=null`",
        {"training": finetune.validation, "distillation": distill.held_out},
    ),
    Check(
        "output",
        "the coordinator's host",
        "not writable, less than 256 MiB, checkpoints of another run, or its own are gone",
        "another `--output`, `--resume`, or mount the folder of checkpoints",
        {"training": finetune.probe_output, "distillation": distill.probe_output},
    ),
    Check(
        "logits",
        "of a distillation: the hosts of teachers and student",
        "the folder between them is not writable, has less than 256 MiB, or is not the same folder",
        "mount the [shared folder](share.md) on both, or set `logits` to a path that all have",
        {"distillation": distill.folders_probe("logits")},
    ),
    Check(
        "checkpoints",
        "the coordinator's host",
        "`checkpoint.folder` is not writable or has less than 256 MiB",
        "free space, or another folder",
        {
            "training": finetune.probe_checkpoints,
            "distillation": distill.folders_probe("checkpoints"),
        },
    ),
    Check(
        "unit",
        "hosts with systemd units",
        "units cannot see the run's files (`/home`, `/tmp`), or may not write its output",
        "a folder below `/var/lib/motley` or the shared folder, or `trainer_writable_folders`",
        {"training": finetune.probe_units, "distillation": distill.probe_units},
    ),
    Check(
        "memory",
        "hosts that take part",
        "the plan needs more than 90 % of the free main memory or a card's, 95 % on Vulkan",
        "fewer workers, `data.max_seq_len`, `lora`, `nf4`",
        {"training": finetune.probe_memory},
    ),
    Check(
        "layers",
        "hosts that take part",
        "warns: reading layers that do not fit slows computing; a file is read for two seconds",
        "what the line names: a faster disk, larger micro-batches",
        {"training": finetune.probe_layers},
    ),
    Check(
        "port",
        "the coordinator's host",
        "the address is not the host's own, or the port is taken; names the process that uses it",
        "`motley_port`, `motley_bind_address`",
        {"plan": _probe_port},
    ),
    Check(
        "link",
        "the other hosts",
        "no TCP connection to the address, or large packets are lost; warns below 100 Mbit/s",
        "open the port to the cluster (the role `trainer` does), `motley_connect_address`",
        {"plan": _probe_links},
    ),
    Check(
        "mtu",
        "the other hosts",
        "warns: the route's MTU is not that of the coordinator's interface",
        "set the same on both, or the one of the switch between them: `ip link set DEV mtu N`",
        {"plan": _probe_mtu},
    ),
    # Of the cluster: `launch doctor` finds it.
    Check("plan", "the cluster", "the inventory does not allow a plan", "", {}),
)
"""Every check, in the order in which a host's are shown."""
INPUT_CHECKS = ("model", "data", "validation")
"""Those of what a run reads."""
