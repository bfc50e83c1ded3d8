"""Requirements of a ring: enough equal devices that torch.distributed supports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from trainer.config.capabilities import explain_backend
from trainer.config.exchange import MIN_RING_SIZE, RING_NOTE, ExchangeConfig
from trainer.system.errors import InputError

_INSTEAD = "choose others with --limit or motley_devices, or leave exchange.topology at star"


def in_ring_order(hosts: Sequence[Host], head: Host) -> list[Host]:
    """Return the hosts with that of rank 0, which keeps the run, first."""
    return [head, *(host for host in hosts if host.name != head.name)]


def check_ring(
    exchange: ExchangeConfig, head: Host, workers: Sequence[tuple[Host, Sequence[Device]]]
) -> None:
    """Check the workers of a run; those of a star pass.

    Args:
        workers: by rank, the host and the devices of each.

    Raises:
        ConfigError: they are too few or not equal, or have devices that torch.distributed
            does not support.
    """
    if not exchange.is_ring:
        return
    try:
        exchange.check_worker_count(len(workers))
    except InputError as error:
        count = f"--expect-workers {MIN_RING_SIZE}"
        remedy = f"; or give more: {count} where a host fills up with CPU workers"
        raise ConfigError(f"{error}{remedy}") from None
    for rank, (host, devices) in enumerate(workers):
        if devices[0].group is not None:
            raise ConfigError(
                f"exchange.topology ring: worker-{rank} on {host.name} is a replica group, and each"
                f" worker of a ring has one device; {_INSTEAD}"
            )
        backend = devices[0].backend
        if refusal := explain_backend(backend, "ring"):
            raise ConfigError(
                f"worker-{rank} on {host.name} computes with {backend}: {refusal}; {_INSTEAD}"
            )
    first = workers[0][0]
    for rank, (host, devices) in enumerate(workers):
        kinds = _device_kind(workers[0][1][0]), _device_kind(devices[0])
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"exchange.topology ring: worker-{rank} on {host.name} has {kinds[1]}, worker-0 on"
                f" {first.name} has {kinds[0]}, and each step waits for the slowest; {_INSTEAD}"
            )
    if first.name != head.name:
        raise ConfigError(
            f"exchange.topology ring: {head.name} has no device to train on, and rank 0 keeps the"
            " run; set motley_coordinator: true on a host that trains"
        )


def ring_notes(exchange: ExchangeConfig, run_id: str) -> list[str]:
    """Return the line for a start of a ring; none for a star."""
    if not exchange.is_ring:
        return []
    return [f"{RING_NOTE}; after an end: launch cluster up --resume {run_id}"]


def _device_kind(device: Device) -> str:
    return (device.name or f"a {device.backend} device") if device.is_gpu else "CPU"
