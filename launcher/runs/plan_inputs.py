"""The inputs of `launch plan`: a model by its config, and the devices of hosts."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from launcher.agent.checks.host_speeds import HostSpeeds, measure_host
from launcher.errors import ConfigError, UnreachableError
from launcher.hosts.fleet import ask_hosts
from launcher.hosts.survey import Survey
from launcher.inventory.hosts import Host, load_inventory
from launcher.plan.budget import find_currency, list_host_rates
from launcher.plan.hub import cached_snapshot, is_hub_name, is_offline
from launcher.runs.up import survey_hosts
from launcher.terminal import note, show_progress
from trainer.checkpoint.adapter_folder import find_adapter, read_base_name
from trainer.checkpoint.reader import FOLDER as CHECKPOINTS
from trainer.checkpoint.reader import RUN_FILE, find_checkpoint
from trainer.model.files import local_model
from trainer.model.hf_export import ADAPTER_CONFIG
from trainer.planning import devices as known
from trainer.planning.cost import Prices
from trainer.planning.device_models import DeviceModel, find_device
from trainer.planning.devices import (
    CORE_FLOPS,
    MAIN_MEMORY,
    PCIE,
    ClusterShape,
    HostPool,
    LinkRates,
)
from trainer.planning.model_config import (
    check_folder_trains,
    check_trains,
    named_shape,
    parse_shape,
    read_shape,
)
from trainer.planning.shapes import NAMED, ModelShape
from trainer.planning.time import EFFICIENCY
from trainer.system.errors import InputError

_ASSUMED = f"CPU: {CORE_FLOPS / 1e9:g} GFLOP/s a core are assumed"
_HUB = "https://huggingface.co/{}/resolve/main/config.json"
_DEADLINE = 20.0
_MOST = 1 << 20


def untrained_model(name: str) -> str:
    """Return the model that a name stands for: of an adapter its base, of an output its checkpoint.

    Raises:
        InputError: an output folder has no intact checkpoint, or an adapter names no base.
    """
    path = Path(name).expanduser()
    is_trained = any((path / part).exists() for part in (ADAPTER_CONFIG, RUN_FILE, CHECKPOINTS))
    if not is_trained or (path / "config.json").is_file():
        return name
    adapter = find_adapter(path)
    if adapter is None:
        return str(find_checkpoint(path))
    base = read_base_name(adapter)
    note(f"{name} is an adapter; its base is planned: {base}")
    return base


def model_shape(model: str | None, shape: str | None, method: str | None = None) -> ModelShape:
    """Return the shape of a folder, a GGUF file, a hub name or a named shape.

    Args:
        method: how it is trained; None: it is not, as a teacher.

    Raises:
        ConfigError: neither or both are given, or it cannot be read.
        InputError: it is known that no such model trains by the method.
        UnreachableError: the hub does not answer.
    """
    if (model is None) == (shape is None):
        raise ConfigError("give either --model DIR|NAME or --shape NAME")
    if shape is not None:
        return named_shape(shape)
    assert model is not None
    if (folder := local_model(Path(model))) is not None:
        check_folder_trains(folder, model, method)
        return replace(read_shape(folder), name=Path(model).name or folder.name)
    if not is_hub_name(model, Path.cwd()):
        raise ConfigError(f"no model folder {model}, and not a hub name such as Qwen/Qwen3-4B")
    snapshot = cached_snapshot(model)
    if snapshot is not None and (snapshot / "config.json").is_file():
        check_folder_trains(snapshot, model, method)
        return replace(read_shape(snapshot), name=model)
    return _from_hub(model, method)


def named_student(name: str) -> ModelShape:
    """Return a named shape, else that of a folder, a GGUF file or a hub name, which trains.

    Raises:
        ConfigError: it is none of them.
        UnreachableError: the hub does not answer.
    """
    return NAMED[name] if name in NAMED else model_shape(untrained_model(name), None, "lora")


def _from_hub(name: str, method: str | None) -> ModelShape:
    """Fetch a config.json alone, by HTTPS."""
    if is_offline():
        raise ConfigError(
            f"{name} is not in the hub cache, and downloads are disabled on this machine"
        )
    address = _HUB.format(name)
    try:
        with urllib.request.urlopen(address, timeout=_DEADLINE) as answer:  # noqa: S310  # _HUB is https
            tree = json.loads(answer.read(_MOST))
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{address}: {error.code} {error.reason}; check the name") from None
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{address}: {error}; give a folder with its config.json") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{address}: not a JSON object")
    tree = cast("dict[str, Any]", tree)
    if method is not None:
        check_trains(tree, name, method)
    return parse_shape(tree, address, name)


def describe_cluster(
    hosts: Sequence[Host],
    between: LinkRates | None,
    speeds: Mapping[str, HostSpeeds] | None = None,
) -> ClusterShape:
    """Return surveyed hosts as groups of equal ones.

    Args:
        between: the link between two hosts; None: unknown.
        speeds: what was measured on hosts, by name; of equal ones the slowest counts.

    Raises:
        ConfigError: a device's memory is not known, or several hosts have no link.
    """
    remarks: list[str] = []
    alike: dict[tuple[tuple[DeviceModel, int], ...], list[Host]] = {}
    for host in hosts:
        if kinds := tuple(_count_devices(host, remarks).items()):
            alike.setdefault(kinds, []).append(host)
    groups = tuple(
        _make_pool(equal, device, count, place, speeds or {}, remarks)
        for kinds, equal in alike.items()
        for place, (device, count) in enumerate(kinds)
    )
    if not groups:
        raise ConfigError("no host of the inventory has a device to train on")
    cluster = ClusterShape(groups=groups, between=between, remarks=tuple(dict.fromkeys(remarks)))
    try:
        return known.with_links(cluster) if len(hosts) > 1 else cluster
    except InputError as error:
        raise ConfigError(
            f"{error} with --link, or as motley_link_rates: launch discover --write measures them"
        ) from None


def _make_pool(
    hosts: Sequence[Host],
    device: DeviceModel,
    count: int,
    place: int,
    speeds: Mapping[str, HostSpeeds],
    remarks: list[str],
) -> HostPool:
    """Return one kind of devices of equal hosts, with the least of what these have."""
    measured = [speeds[host.name] for host in hosts if host.name in speeds]
    reads = [speed.read for speed in measured if speed.read]
    memories = [host.memory for host in hosts if host.memory]
    if device.is_processor and measured:
        products = min(speed.products for speed in measured) / count
        device = replace(device, flops=products / EFFICIENCY, source="measured")
        remarks[:] = [remark for remark in remarks if remark != _ASSUMED]
        remarks.append(f"{device.name}: products at {products / 1e9:.3g} GFLOP/s, measured")
    return HostPool(
        hosts=len(hosts),
        devices=count,
        device=device,
        inside=device.nvlink or PCIE,
        shares_host=place > 0,
        main_memory=min(memories) if len(memories) == len(hosts) else None,
        disk=min(reads) if len(reads) == len(hosts) else None,
    )


def _count_devices(host: Host, remarks: list[str]) -> Counter[DeviceModel]:
    found: Counter[DeviceModel] = Counter()
    for device in host.devices or ():
        if not device.is_gpu:
            cores = device.threads or host.cores or 1
            memory = int((host.memory or 0) * MAIN_MEMORY)
            if not memory:
                raise ConfigError(f"host {host.name}: its main memory is unknown")
            remarks.append(_ASSUMED)
            found[known.assume_processor(cores, memory)] += 1
            continue
        try:
            row = find_device(device.name, device.memory)
        except InputError:
            if device.memory is None:
                raise ConfigError(
                    f"host {host.name}: {device.name or device.id} is not a known device and does"
                    " not report its memory; describe it with --cluster"
                ) from None
            remarks.append(f"{device.name or device.id} is not a known device: no time is planned")
            name, size = device.name or device.id, device.memory
            row = DeviceModel(name=name, flops=None, memory=size, watts=None, source="its driver")
        found[row] += 1
    return found


def inventory_cluster(
    inventory: Path | None, link: str | None
) -> tuple[ClusterShape, Prices, Survey]:
    """Return the devices of an inventory's hosts, which are asked, and the hosts' prices.

    Without an inventory they are this machine's.

    Raises:
        ConfigError: the inventory or the rate cannot be used.
        UnreachableError: a host does not answer.
    """
    try:
        between = None if link is None else known.parse_link(link)
    except InputError as error:
        raise ConfigError(f"--link: {error}") from None
    with show_progress("querying the hosts"):
        found = survey_hosts(load_inventory(inventory))
    rates = list_host_rates(found.hosts, {}, found.identities)
    prices = Prices(
        hosts=rates if any(rate.is_priced or rate.watts for rate in rates) else (),
        currency=find_currency(found.hosts, None) or "",
    )
    if link is None and len(found.hosts) > 1 and (rate := slowest_link(found.hosts)) is not None:
        between = LinkRates(up=rate, down=rate)
    if between is not None and len(found.hosts) == 1:
        raise ConfigError(f"--link {link}: needs two hosts; give --inventory")
    return describe_cluster(found.hosts, between), prices, found


def measure_cluster(found: Survey, cluster: ClusterShape, model: str) -> ClusterShape:
    """Return surveyed hosts with the speeds of their disks and processors, which are measured."""
    with show_progress("measuring how fast the hosts read and multiply"):
        path = Path(model).expanduser().absolute()
        answers = ask_hosts(
            found.hosts, lambda _, there: there.ask(measure_host, path), measure_host.deadline
        ).require()
    return describe_cluster(found.hosts, cluster.between, answers)


def slowest_link(hosts: Sequence[Host]) -> float | None:
    """Return the slowest of the measured rates between hosts in bytes a second.

    None if a pair has none, for its rate may be the slowest. One direction of a pair suffices.
    """
    rates = {
        frozenset((host.name, other)): rate / 8 for host in hosts for other, rate in host.link_rates
    }
    for host in hosts:
        for other, rate in host.link_rates:
            pair = frozenset((host.name, other))
            rates[pair] = min(rates[pair], rate / 8)
    pairs = [frozenset((a.name, b.name)) for a, b in itertools.combinations(hosts, 2)]
    return (
        min((rates[pair] for pair in pairs), default=None) if rates.keys() >= set(pairs) else None
    )
