"""The default process group: one meeting point, one timeout, one line for what fails."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from queue import Empty, SimpleQueue

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from trainer.config.capabilities import check_backend
from trainer.replica.backend import UnusableError, find_cuda_device
from trainer.run.distributed.environment import Environment
from trainer.system.backends import RequestedBackend
from trainer.system.errors import InputError, UnreachableError, first_line
from trainer.system.process.native_thread import NativeThread

_PAUSE = 0.5
"""Seconds between two looks at a store that another attempt holds."""
_GRACE = 10.0
"""Seconds beyond its own deadline that torch may take to say why nothing answers."""


def choose_rank_device(
    environment: Environment, wanted: RequestedBackend, gpu: str
) -> torch.device:
    """Return this rank's device: of several on a host, the one of its number there.

    Args:
        gpu: an index, UUID, PCI address or name; empty for the one of the rank's number.

    Raises:
        InputError: it was required, and is not available.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    check_backend(wanted, "ranks")
    number = environment.rank if environment.local_rank is None else environment.local_rank
    if environment.local_rank is None and torch.cuda.is_available():
        number %= torch.cuda.device_count()
    try:
        return torch.device(find_cuda_device(gpu or str(number)))
    except UnusableError as error:
        if wanted == "cuda" or gpu:
            raise InputError(f"rank {environment.rank}: {error}") from None
        return torch.device("cpu")


def open_store(environment: Environment, patience: float) -> Store:
    """Return the store of the job, which torchrun holds, or else rank 0.

    A rank that was started again waits until the others of its former attempt have ended too: in
    their store it would find what they wrote, and mix with them.

    Args:
        patience: seconds.

    Raises:
        InputError: rank 0 cannot listen.
        UnreachableError: rank 0 does not answer, or has this rank already.
    """
    deadline = time.monotonic() + patience
    while True:
        store = _connect_in_time(patience, environment)
        if store is not None:
            return store
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"rank {environment.rank}: another process has used this rank at"
                f" {environment.host}:{environment.port} for {patience:g} s: stop the job there, "
                "or give this one another --master"
            )
        time.sleep(_PAUSE)


def _connect_in_time(patience: float, environment: Environment) -> Store | None:
    """Return the store, None if it has this rank already or has ended, within a deadline of ours.

    A port that accepts and never answers blocks torch for ever, signals included, so that torch
    waits in a thread of its own.
    """
    found: SimpleQueue[Store | BaseException | None] = SimpleQueue()

    def claim_rank() -> None:
        try:
            store = _connect_store(environment, patience)
            claimed = environment.by_torchrun or store.add(f"claim-{environment.rank}", 1) == 1
            found.put(store if claimed else None)
        except dist.DistError:  # it ended meanwhile
            found.put(None)
        except BaseException as error:  # raised in the thread that waits
            found.put(error)

    NativeThread(claim_rank, "meeting").start()
    try:
        # torch's own deadline ends an attempt first, where it counts.
        result = found.get(timeout=patience + _GRACE)
    except Empty:
        raise UnreachableError(
            f"rank {environment.rank}: a process accepts connections at "
            f"{environment.host}:{environment.port}"
            f" and does not answer for {patience:g} s; is that port rank 0's?"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result


def _connect_store(environment: Environment, patience: float) -> Store:
    """Return the store that is there now; for errors see `open_store`."""
    where = f"{environment.host}:{environment.port}"
    try:
        if environment.by_torchrun:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
            # The agent's store outlives a restart, with what the ranks before wrote into it.
            return PrefixStore(f"attempt-{environment.attempt}", store)
        return TCPStore(
            environment.host,
            environment.port,
            environment.world_size,
            is_master=environment.rank == 0,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            master_listen_fd=_listen_on_master(environment) if environment.rank == 0 else None,
        )
    except (dist.DistError, ValueError, OSError) as error:
        if environment.rank == 0 and not environment.by_torchrun:
            raise InputError(
                f"rank 0 cannot listen on {where}: another program has the port, or the address is"
                " not this host's; give another --master"
            ) from None
        raise UnreachableError(
            f"rank {environment.rank} cannot reach rank 0 at {where}: {first_line(error)}"
        ) from None


def _listen_on_master(environment: Environment) -> int | None:
    """Return a socket on the one address of `--master`, for the store to own.

    None if the store must listen on every address: a name may mean another address on this host
    than on others, and a router may forward an address that this host does not have.

    Raises:
        OSError: another program has the port.
    """
    try:
        version = ip_address(environment.host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        return socket.create_server((environment.host, environment.port), family=family).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def choose_collectives(device: torch.device) -> str:
    """Return the engine of collectives for each kind of tensor: NCCL between CUDA devices.

    What ranks tell each other from their hosts' memory goes by gloo on any device.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def open_process_group(
    environment: Environment, store: Store, device: torch.device, timeout: float
) -> Iterator[None]:
    """Open the default process group, and close it.

    Args:
        timeout: of a collective, in seconds.
    """
    if name := _interface_towards(environment):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        choose_collectives(device),
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _interface_towards(environment: Environment) -> str | None:
    """Return the network interface on which the others reach this rank; None if it is not found.

    gloo takes that of the host's own name, which Debian and Ubuntu give to loopback.
    """
    try:
        kind, _, _, _, target = socket.getaddrinfo(
            environment.host, environment.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it chooses the route
            own = probe.getsockname()[0].partition("%")[0]
    except OSError:  # gloo says what it lacks
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None
