"""The target of an exported run: equal nodes with equal devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError
from launcher.inventory.hosts import Host
from trainer.config.run import RunConfig
from trainer.model.shards import check_shards
from trainer.planning.device_models import find_device
from trainer.system.backends import BACKENDS, Backend
from trainer.system.errors import InputError

_TARGET = re.compile(r"(\d{1,5})\s*nodes?\s*x\s*(\d{1,4})\s+(\S.*)", re.IGNORECASE)
_DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._()/+@-]{0,79}")
"""It stands in comments of scripts and in names of resources."""
_EXAMPLE = "'2 nodes x 8 H100', or '2 nodes x 4 CPU' for processes on processors"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Equal nodes; each process of the run has a device of its own."""

    nodes: int
    devices: int
    """Processes of each node."""
    device: str | None
    """The name of a card as `planning.devices` has it, or an inventory's; None: processors."""
    hosts: tuple[tuple[str, str], ...] = ()
    """Name and address of each node, for a target that is an inventory."""

    def __post_init__(self) -> None:
        if self.device is not None and not _DEVICE_NAME.fullmatch(self.device):
            raise ConfigError(
                f"device name {self.device[:80]!r}: not the name of a card; name the nodes instead:"
                " --target '2 nodes x 8 H100'"
            )

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.nodes * self.devices

    @property
    def cores_per_process(self) -> int:
        """Cores that are asked for each process: a card's reads data and feeds the card beside."""
        return 1 if self.device is None else 4

    @property
    def backend(self) -> str:
        """The trainer's backend."""
        return "cpu" if self.device is None else "cuda"

    @property
    def text(self) -> str:
        """The target in one line, which `parse_target` reads."""
        nodes = "node" if self.nodes == 1 else "nodes"
        return f"{self.nodes} {nodes} x {self.devices} {self.device or 'CPU'}"


def parse_target(text: str) -> Target:
    """Return a target such as `2 nodes x 8 H100`.

    Raises:
        ConfigError: it cannot be read, or the device is unknown or not NVIDIA's.
    """
    found = _TARGET.fullmatch(text.strip())
    if found is None or not int(found[1]) or not int(found[2]):
        raise ConfigError(f"--target: cannot read {text!r}; write it as {_EXAMPLE}")
    nodes, devices = int(found[1]), int(found[2])
    if found[3].lower() == "cpu":
        return Target(nodes=nodes, devices=devices, device=None)
    try:
        device = find_device(found[3])
    except InputError as error:
        raise ConfigError(f"--target: {error}, or CPU") from None
    if not device.source.startswith("NVIDIA"):
        raise ConfigError(
            f"--target: equal processes compute on CUDA or on processors, not on {device.name};"
            " launch cluster up trains on it"
        )
    return Target(nodes=nodes, devices=devices, device=device.name)


def choose_target(hosts: Sequence[Host]) -> Target:
    """Return the hosts of an inventory, surveyed, as a target.

    Raises:
        ConfigError: they differ, or have devices that torch.distributed does not support.
    """
    kinds: dict[str, Counter[tuple[Backend, str]]] = {}
    for host in hosts:
        devices = host.devices or ()
        kinds[host.name] = Counter((one.backend, one.name if one.is_gpu else "") for one in devices)
    first, kind = next(iter(kinds.items()))
    for name, other in kinds.items():
        if other != kind:
            raise ConfigError(
                f"{name} has {_format_devices(other)}, {first} has {_format_devices(kind)}: "
                "an exported run needs equal hosts; choose some with --limit, or train on all: "
                "launch cluster up"
            )
    if len(kind) != 1:
        raise ConfigError(
            f"{first} has {_format_devices(kind)}: an exported run needs equal devices; name those "
            "to use in motley_devices, or train on all: launch cluster up"
        )
    ((backend, name), count) = next(iter(kind.items()))
    facts = BACKENDS[backend]
    if not facts.has_torch:
        raise ConfigError(
            f"{first}: equal processes compute on CUDA or on processors, not on {name or 'Vulkan'};"
            " launch cluster up trains on it"
        )
    return Target(
        nodes=len(hosts),
        devices=count,
        device=(name or "GPU") if facts.is_gpu else None,
        hosts=tuple((host.name, _reachable_address(host)) for host in hosts),
    )


def check_strategy(config: RunConfig, target: Target, model: Path | None) -> None:
    """Refuse a run that the target cannot train.

    Args:
        model: the model's folder; None for a hub name, whose sizes are checked at the start.

    Raises:
        ConfigError: the sizes do not divide, or ranks would save where others cannot read.
    """
    if config.distillation is not None:
        raise ConfigError(
            "distillation: equal processes train on samples, not on logits; leave the section out"
        )
    try:
        config.parallel.count_copies(target.world_size)
        if model is not None:
            check_shards(model, config)
    except InputError as error:
        raise ConfigError(f"{target.text}: {error}") from None


def _format_devices(kind: Counter[tuple[Backend, str]]) -> str:
    parts = [f"{count} x {name or backend}" for (backend, name), count in sorted(kind.items())]
    return " and ".join(parts) or "no device"


def _reachable_address(host: Host) -> str:
    own = host.connect_address or host.bind_address or host.address
    return own or ("127.0.0.1" if host.is_local else host.name)
