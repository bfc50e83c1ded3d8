"""Which process runs where: Hosts + run config -> LaunchPlan. Pure: contacts no machine.

Ranks follow the inventory: hosts in its order, on each host the devices in theirs, then the
additional CPU workers. The same inventory always gives the same ranks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from launcher.errors import ConfigError, PreflightError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host, find_coordinator_host
from launcher.plan.plan import COORDINATOR, LaunchPlan, ProcessPlan
from launcher.plan.plan_context import PlanContext
from launcher.plan.ring import check_ring, in_ring_order
from trainer.config.run import RunConfig
from trainer.system.process.child import FALLBACK_VARIABLE


@dataclass(frozen=True)
class _WorkerSlot:
    host: Host
    devices: tuple[Device, ...]
    """One, or those of a replica group."""
    local_rank: int
    is_fixed: bool
    """The inventory sets the number of threads."""


def place_run(
    hosts: Sequence[Host], config: RunConfig, expect_workers: int | None, setting: PlanContext
) -> LaunchPlan:
    """Return the plan of a run; `expect_workers` None takes every device once.

    A ring has no coordinator: its rank 0, on the coordinator's host, leads.

    Raises:
        ConfigError: the hosts' roles, addresses or devices do not fit together, or make no ring.
        PreflightError: there are too few devices and no host allows more CPU workers.
    """
    refuse_unknown_devices(hosts)
    _refuse_shared_devices(hosts, setting)
    head, ring = _coordinator_host(hosts), config.exchange.is_ring
    slots = _assign_workers(in_ring_order(hosts, head) if ring else hosts, expect_workers)
    check_ring(config.exchange, head, [(slot.host, slot.devices) for slot in slots])
    bind = _bind_address(head, slots, setting)
    listen = format_endpoint(bind, head.port)
    world = len(slots) if ring else None
    workers = [
        _plan_worker(rank, slot, head, bind, setting, world) for rank, slot in enumerate(slots)
    ]
    reached_at = {head.connect_address, *(_connect_address(s.host, head, bind) for s in slots)}
    names = tuple(sorted({bind, head.name, *(name for name in reached_at if name)}))
    coordinator = ProcessPlan(
        name=COORDINATOR,
        role="coordinator",
        rank=None,
        local_rank=None,
        host=head.name,
        device="",
        backend="cpu",
        threads=1,
        address=listen,
        argv=(
            *_trainer_command(head, setting),
            *_role_command(head, setting, COORDINATOR, "coordinator"),
            *("--bind", listen, "--expect-workers", str(len(slots))),
        ),
        env=build_environment(1),
        folder=setting.process_folder(head, COORDINATOR),
        certificate_names=names,
    )
    used = {head.name, *(slot.host.name for slot in slots)}
    return LaunchPlan(
        run_id=setting.run_id,
        output=config.output,
        bind_address=bind,
        port=head.port,
        hosts=tuple(host for host in hosts if host.name in used),
        processes=tuple(workers) if ring else (coordinator, *workers),
    )


def format_endpoint(address: str, port: int) -> str:
    """Return `ADDRESS:PORT`, an IPv6 address in brackets (RFC 3986)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def refuse_unknown_devices(hosts: Sequence[Host]) -> None:
    """Raise ConfigError for a host whose devices are unknown."""
    for host in hosts:
        if host.devices is None:
            raise ConfigError(
                f"host {host.name}: motley_devices is auto, and the host has not been queried; "
                "list its devices in the inventory"
            )


def _coordinator_host(hosts: Sequence[Host]) -> Host:
    head = find_coordinator_host(hosts)
    if not head.coordinator and len(hosts) > 1:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(f"set motley_coordinator: true on one of the hosts {names}")
    return head


def _refuse_shared_devices(hosts: Sequence[Host], setting: PlanContext) -> None:
    """Check that two inventory names of one machine do not train on the same card."""
    owners: dict[tuple[str, str], str] = {}
    for host in hosts:
        for device in host.devices or ():
            if not device.is_gpu:
                continue
            card = setting.get_machine_id(host), device.pci or device.id
            if card in owners:
                raise ConfigError(
                    f"hosts {owners[card]} and {host.name} are the same machine "
                    f"and both claim {device.id}"
                    if owners[card] != host.name
                    else f"host {host.name}: motley_devices names the card {device.pci} twice"
                )
            owners[card] = host.name


def _assign_workers(hosts: Sequence[Host], expect: int | None) -> list[_WorkerSlot]:
    """Return one slot per worker, in rank order."""
    counts = {host.name: len(_by_worker(host.devices or ())) for host in hosts}
    found = sum(counts.values())
    wanted = max(1, found) if expect is None else expect
    if wanted < 1:
        raise ConfigError(f"--expect-workers must be at least 1, got {wanted}")
    fillers = [host for host in hosts if host.fill_with_cpu]
    if wanted > found and not fillers:
        raise PreflightError(
            f"{wanted} workers are expected, but the inventory has {found} devices; add hosts, "
            "set motley_fill_with_cpu: true on one, or lower --expect-workers"
        )
    extra = dict.fromkeys((host.name for host in hosts), 0)
    for _ in range(wanted - found):
        # The host on which one more CPU worker gets the most cores; the first one on a tie.
        host = max(fillers, key=lambda h: (h.cores or 1) / (counts[h.name] + extra[h.name] + 1))
        extra[host.name] += 1
    slots: list[_WorkerSlot] = []
    for host in hosts:
        workers = [*_by_worker(host.devices or ()), *[[Device("cpu", "cpu")]] * extra[host.name]]
        taken = workers[: wanted - len(slots)]
        shared = iter(share_cores(host, [device for worker in taken for device in worker]))
        slots += [
            _WorkerSlot(
                host,
                tuple(islice(shared, len(worker))),
                index,
                is_fixed=worker[0].threads is not None,
            )
            for index, worker in enumerate(taken)
        ]
    return slots


def _by_worker(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices of each worker: those of a replica group are one worker's."""
    workers: list[list[Device]] = []
    for device in devices:
        if workers and device.group is not None and device.group == workers[-1][0].group:
            workers[-1].append(device)
        else:
            workers.append([device])
    return workers


def share_cores(host: Host, devices: Sequence[Device]) -> list[Device]:
    """Divide the host's cores between its CPU processes; each GPU process keeps one for itself.

    The coordinator needs little and gets no core of its own. Threads set in the inventory stay.
    """
    unpinned = [i for i, d in enumerate(devices) if not d.is_gpu and d.threads is None]
    if host.cores is None or not unpinned:
        return list(devices)
    fixed = sum(d.threads or 1 for i, d in enumerate(devices) if i not in unpinned)
    each, rest = divmod(max(0, host.cores - fixed), len(unpinned))
    result = list(devices)
    for position, index in enumerate(unpinned):
        threads = max(1, each + (1 if position < rest else 0))
        result[index] = replace(devices[index], threads=threads)
    return result


def _bind_address(head: Host, slots: Sequence[_WorkerSlot], setting: PlanContext) -> str:
    """Return the one address to listen on: explicit, loopback on one host, else by route."""
    here = setting.get_machine_id(head)
    far = sorted({s.host.name for s in slots if setting.get_machine_id(s.host) != here})
    if head.bind_address is None and not far:
        return "127.0.0.1"
    candidate = head.bind_address or setting.routes.get(head.name)
    if candidate is None and setting.no_route:
        raise ConfigError(setting.no_route)
    candidate = candidate or _get_literal_address(head.address)
    if candidate is None:
        raise ConfigError(
            f"host {head.name}: set motley_bind_address to its address on the network "
            "of the workers"
        )
    kind = _unreachable_kind(candidate)
    if kind and far:
        raise ConfigError(
            f"host {head.name}: motley_bind_address {candidate} is {kind}; workers on "
            f"{', '.join(far)} cannot reach it"
        )
    return candidate


def _unreachable_kind(address: str) -> str:
    """Return why no other machine can connect to an address; empty if one may."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return "loopback"
    # fe80:: and 169.254: each machine would need another spelling of it, with its own interface.
    return "link-local" if parsed.is_link_local else ""


def _connect_address(host: Host, head: Host, bind: str) -> str:
    if host.connect_address is not None:
        return host.connect_address
    if host.name == head.name:
        return bind
    return head.connect_address or bind


def _plan_worker(
    rank: int, slot: _WorkerSlot, head: Host, bind: str, setting: PlanContext, world: int | None
) -> ProcessPlan:
    """Return a worker of a star, or of a ring of `world`, which has no use for certificates."""
    host, device = slot.host, slot.devices[0]
    name = f"worker-{rank}"
    members = tuple(each.id for each in slot.devices) if device.group is not None else ()
    target = format_endpoint(_connect_address(host, head, bind), head.port)
    gpu = ("--gpus", device.id) if device.is_gpu else ()
    if members:
        ids = members if device.is_gpu else map(str, range(len(members)))
        gpu = ("--gpus", ",".join(ids), "--strategy", device.strategy)
    # The share of the cores is a worker's maximum, set in its environment: it computes with
    # fewer threads while other programs use them.
    threads = ("--threads", str(device.threads)) if slot.is_fixed else ()
    own = {host.name, host.bind_address or setting.routes.get(host.name) or host.address}
    if setting.get_machine_id(host) == setting.get_machine_id(head):
        own.add(bind)
    place = (
        *_role_command(host, setting, name, "worker"),
        *("--rank", str(rank), "--coordinator", target),
    )
    if world is not None:
        own.clear()
        place = ("--distributed", "--world-size", str(world), "--rank", str(rank))
        place = (*place, "--master", target)
    return ProcessPlan(
        name=name,
        role="worker",
        rank=rank,
        local_rank=slot.local_rank,
        host=host.name,
        device=f"{'+'.join(members)} ({device.strategy})" if members else device.id,
        members=members,
        strategy=device.strategy,
        backend=device.backend,
        threads=device.threads,
        address=target,
        argv=(
            *_trainer_command(host, setting),
            *place,
            *("--gpu-backend", device.backend, *gpu, *threads),
        ),
        env=build_environment(device.threads, may_fall_back=host.auto_devices),
        folder=setting.process_folder(host, name),
        certificate_names=tuple(sorted(name for name in own if name)),
    )


def _trainer_command(host: Host, setting: PlanContext) -> tuple[str, ...]:
    return (
        *setting.get_trainer_command(host),
        "finetune",
        *("--config", f"{setting.run_folder(host)}/run.yaml"),
        *("--run-id", setting.run_id),
        *setting.script_options(host),
    )


def _role_command(host: Host, setting: PlanContext, name: str, role: str) -> tuple[str, ...]:
    return "--role", role, "--tls", f"{setting.process_folder(host, name)}/tls"


def build_environment(threads: int | None, *, may_fall_back: bool = False) -> dict[str, str]:
    """Return the environment of a process; BLAS and OpenMP get the thread share.

    PYTHONSAFEPATH is `-P` for programs that the trainer's libraries start: the working folder of a
    process is one that it writes to.
    """
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if may_fall_back:
        environment[FALLBACK_VARIABLE] = "1"
    if threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return environment


def _get_literal_address(address: str | None) -> str | None:
    """Return an address that needs no name service; None for a host name."""
    try:
        return str(ipaddress.ip_address(address or ""))
    except ValueError:
        return None
