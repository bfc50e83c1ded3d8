"""Query all hosts for what the inventory does not set: devices, cores, addresses, routes.

A host that is not connected, or stops answering, keeps the inventory's values and counts as failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from launcher.agent.operation import Operation
from launcher.agent.operations import describe_machine, detect_devices, find_routes, list_names
from launcher.errors import ConfigError, LauncherError, UnreachableError
from launcher.files import SHARE
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import RUN_USER
from launcher.hosts.fleet import ask_each
from launcher.inventory.facts.devices import Detection, Device
from launcher.inventory.facts.machine import Machine
from launcher.inventory.facts.network import Route
from launcher.inventory.hosts import Host
from launcher.plan.routes import Choice, choose_address

SOFTWARE_VULKAN = ("llvmpipe", "swiftshader")
"""The ids of the CPU's Vulkan devices in an inventory; detection otherwise leaves them out."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The surveyed hosts and their answers, by host name."""

    hosts: tuple[Host, ...]
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Devices that are present but unusable."""
    spare: Mapping[str, tuple[Device, ...]] = field(default_factory=dict[str, tuple[Device, ...]])
    """Devices that work and that the inventory could list: `auto` leaves Vulkan's out."""
    machines: Mapping[str, Machine] = field(default_factory=dict[str, Machine])
    failures: Mapping[str, LauncherError] = field(default_factory=dict[str, LauncherError])
    """Hosts that could not be asked, and why."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """The address of each host on the route between the coordinator and the others."""
    ways: Mapping[str, Route] = field(default_factory=dict[str, Route])
    """The route of each host to the coordinator's address."""
    connections: Mapping[str, Connection] = field(default_factory=dict[str, Connection])
    """The connections to the hosts, open for further questions."""
    no_route: str = ""
    """Why no address of the coordinator's host could be chosen by route."""

    @property
    def identities(self) -> dict[str, str]:
        """Ids of machines; two names of one machine have the same."""
        return {name: machine.identity for name, machine in self.machines.items()}


def survey_connections(
    hosts: Sequence[Host],
    connections: Mapping[str, Connection],
    unreachable: Mapping[str, LauncherError] | None = None,
) -> Survey:
    """Return the hosts with their own data; hosts without a connection are unchanged.

    Args:
        unreachable: the hosts that should have a connection but have none; they are failures.
    """
    errors = dict(unreachable or {})
    ask = _HostQuestions(connections, errors)
    connected = [host.name for host in hosts if host.name in connections]
    machines = ask.ask_all(describe_machine, {name: {} for name in connected})
    wanted = {host.name: how for host in hosts if (how := _device_question(host)) is not None}
    open_hosts = {name: how for name, how in wanted.items() if name in machines}
    found = ask.ask_all(detect_devices, open_hosts)
    shares = ask.ask_all(list_names, _without_share(hosts, machines, connections))
    learned: list[Host] = []
    problems: dict[str, tuple[str, ...]] = {}
    spare: dict[str, tuple[Device, ...]] = {}
    for host in hosts:
        if host.name in found:
            host, problems[host.name] = apply_devices(host, found[host.name])
            spare[host.name] = _find_unused_gpus(host, found[host.name])
        if host.name in machines:
            host = _apply_machine(host, machines, connections[host.name])
        if PurePosixPath(SHARE).name in shares.get(host.name, ()):
            host = replace(host, share_folder=SHARE)
        learned.append(host)
    ways, choice, no_route = _choose_routes(learned, machines, ask)
    return Survey(
        hosts=tuple(learned),
        problems=problems,
        spare=spare,
        machines=machines,
        failures=errors,
        connections={name: connections[name] for name in machines},
        sources=choice.sources if choice else {},
        ways={name: routes[choice.bind] for name, routes in ways.items()} if choice else {},
        no_route=no_route,
    )


def apply_devices(host: Host, detection: Detection) -> tuple[Host, tuple[str, ...]]:
    """Return a host with its detected devices, and the problems with them.

    Without a list in the inventory these are all that `auto` takes; else those that it names.
    """
    if host.devices is None:
        return replace(host, devices=detection.devices, auto_devices=True), detection.problems
    found = (*detection.devices, *detection.vulkan)
    reasons = (*detection.problems, *detection.vulkan_problems)
    known = [(device, _find_known_device(device, found)) for device in host.devices]
    problems = tuple(_explain_absence(device, reasons) for device, match in known if match is None)
    devices = tuple(
        replace(match or device, group=device.group, strategy=device.strategy)
        for device, match in known
    )
    return replace(host, devices=devices), problems


def _find_unused_gpus(host: Host, detection: Detection) -> tuple[Device, ...]:
    """Return the detected GPUs that are not used."""
    found = (*detection.devices, *detection.vulkan)
    used = {device.pci or device.id for device in host.devices or ()}
    return tuple(d for d in found if d.is_gpu and (d.pci or d.id) not in used)


def _find_known_device(device: Device, found: Sequence[Device]) -> Device | None:
    """Return the detected device for one of the inventory; None when it is missing."""
    if not device.is_gpu:
        return device
    return next((o for o in found if o.backend == device.backend and o.answers_to(device.id)), None)


def _explain_absence(device: Device, reasons: Sequence[str]) -> str:
    """Return why a device of the inventory is missing: the host's reason, if it has one."""
    reason = next((reason for reason in reasons if device.id.lower() in reason.lower()), "")
    missing = f"there is no {device.backend} device {device.id}"
    return f"{missing}: {reason}" if reason else missing


def _device_question(host: Host) -> dict[str, Any] | None:
    """Return the question for a host's devices; None if the inventory lists them completely."""
    if host.devices is None:
        return {}
    accelerators = [device for device in host.devices if device.is_gpu]
    if not accelerators:
        return None
    return {"allow_software": any(device.id.lower() in SOFTWARE_VULKAN for device in accelerators)}


def _apply_machine(host: Host, machines: Mapping[str, Machine], connection: Connection) -> Host:
    machine = machines[host.name]
    names = sum(other.identity == machine.identity for other in machines.values())
    folder = host.state_folder
    if folder is None and not host.is_local:
        folder = connection.state_folder
    cores = max(1, machine.cores // names)
    learned = {"cores": cores, "memory": machine.memory, "provider": machine.provider}
    return replace(host, state_folder=folder, **learned)


def _without_share(
    hosts: Sequence[Host], machines: Mapping[str, Machine], connections: Mapping[str, Connection]
) -> dict[str, dict[str, Any]]:
    """Return the question for hosts of the recipe whose share the inventory does not name.

    It is for the folder above: a mount whose server is gone is not touched.
    """
    return {
        host.name: {"folder": str(PurePosixPath(SHARE).parent)}
        for host in hosts
        if host.share_folder is None
        and not host.is_local
        and host.name in machines
        and connections[host.name].user == RUN_USER
    }


def _choose_routes(
    hosts: Sequence[Host], machines: Mapping[str, Machine], ask: _HostQuestions
) -> tuple[dict[str, dict[str, Route]], Choice | None, str]:
    """Query the hosts that train for their routes to the coordinator's, and choose one."""
    head = next((host for host in hosts if host.coordinator), None)
    if head is None or head.name not in machines:
        return {}, None, ""
    here = machines[head.name]
    others = [
        host.name
        for host in hosts
        if host is not head and host.name in machines and (host.devices or host.fill_with_cpu)
    ]
    far = [name for name in others if machines[name].identity != here.identity]
    if not far:
        return {}, None, ""
    network = here.network
    if head.bind_address is not None:
        chosen = [entry for entry in network.addresses if entry.address == head.bind_address]
        network = replace(network, addresses=tuple(chosen))
    targets = [entry.address for entry in network.addresses]
    ways = ask.ask_all(find_routes, {name: {"targets": targets} for name in far})
    try:
        return ways, choose_address(head, network, ways), ""
    except ConfigError as error:
        return ways, None, str(error)


@dataclass(frozen=True)
class _HostQuestions:
    """One question to many hosts at once; the failure of one is recorded and affects no other."""

    connections: Mapping[str, Connection]
    errors: dict[str, LauncherError]

    def ask_all(
        self, question: Operation[..., T], hosts: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, T]:
        """Return the answers; `hosts` maps each to the question's arguments."""

        def ask(arguments: Mapping[str, Any], there: Connection) -> T:
            return there.ask(question, **arguments)

        questions = {name: (Host(name=name), partial(ask, hosts[name])) for name in hosts}
        answers = ask_each(questions, question.deadline, lambda host: self.connections[host.name])
        for name, error in answers.errors.items():
            known = error if isinstance(error, LauncherError) else UnreachableError(str(error))
            self.errors.setdefault(name, known)
        return answers.found
