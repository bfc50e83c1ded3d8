"""This process's rank and the rendezvous address, from flags or from a launcher.

Flags take precedence; otherwise the variables of torchrun (or of launchers that set the same ones),
of Slurm's `srun`, or of a Kubernetes Indexed Job are used. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.system.errors import InputError

_PORT = 29500
"""The port of torchrun too."""


@dataclass(frozen=True)
class Environment:
    """A process of a distributed job."""

    rank: int
    world_size: int
    local_rank: int | None
    """Its number on its host; None if the launcher does not say."""
    host: str
    """Where rank 0 listens."""
    port: int
    source: str
    """Source of these values, for messages."""
    by_torchrun: bool = False
    """Whether torchrun holds the store in which ranks meet."""
    attempt: str = "0"
    """torchrun's restarts so far."""


def silence_torch() -> None:
    """Keep torch, before its import, from printing a stack for each connection that breaks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def read_environment(
    variables: Mapping[str, str],
    *,
    world_size: int | None = None,
    rank: int | None = None,
    master: str | None = None,
) -> Environment:
    """Return this process's place in its job.

    Args:
        variables: the environment.
        world_size, rank, master: flags; `master` is `HOST:PORT`.

    Raises:
        InputError: something is missing, is no number, or contradicts the rest.
    """
    if rank is not None or "RANK" in variables:
        source, number = "torchrun's variables", "RANK"
        size, local = "WORLD_SIZE", "LOCAL_RANK"
    elif "SLURM_PROCID" in variables:
        source, number, size, local = "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
    elif "JOB_COMPLETION_INDEX" in variables:
        source, number = "the Kubernetes Job", "JOB_COMPLETION_INDEX"
        size, local = "WORLD_SIZE", "LOCAL_RANK"
    else:
        raise InputError(
            "--distributed: neither torchrun, Slurm nor a Kubernetes Indexed Job started this"
            " process; start it with `torchrun --nproc-per-node N -m trainer finetune"
            " --distributed ...`, or give --world-size N --rank R --master HOST:PORT"
        )
    if rank is not None:
        source = "the flags"
    found_rank = _read_number(variables, number, rank, "--rank", source)
    found_size = _read_number(variables, size, world_size, "--world-size", source)
    if found_size < 1 or found_rank >= found_size:
        raise InputError(f"{source}: rank {found_rank} is outside a world of {found_size}")
    local_rank = None
    if rank is None and local in variables:
        local_rank = _read_number(variables, local, None, "", source)
    host, port = _master_address(variables, master, found_size, source)
    by_torchrun = rank is None and "TORCHELASTIC_RUN_ID" in variables
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Environment(found_rank, found_size, local_rank, host, port, source, by_torchrun, attempt)


def _read_number(
    variables: Mapping[str, str], name: str, given: int | None, flag: str, source: str
) -> int:
    if given is not None:
        return given
    text = variables.get(name)
    if text is None:
        raise InputError(f"{source}: {name} is not set; give {flag}")
    if not text.isdecimal():
        raise InputError(f"{source}: {name}={text} must be a number, 0 or more")
    return int(text)


def _master_address(
    variables: Mapping[str, str], given: str | None, world_size: int, source: str
) -> tuple[str, int]:
    """Return where rank 0 listens."""
    if given is not None:
        host, _, port = given.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InputError(f"--master {given}: must be HOST:PORT, such as 10.0.0.1:{_PORT}")
        return host.strip("[]"), int(port)
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT", "")
    if port and not port.isdecimal():
        raise InputError(f"{source}: MASTER_PORT={port} is not a number")
    if host is None and source == "Slurm":
        # Jobs that share a node need ports of their own.
        host = _first_host(variables.get("SLURM_STEP_NODELIST", ""))
        port = port or str(_PORT + int(variables.get("SLURM_JOB_ID", "0")) % 10_000)
    if not host and world_size == 1:
        host = "127.0.0.1"
    if not host:
        raise InputError(
            f"{source}: MASTER_ADDR, the address of rank 0, is not set; set it"
            " (a Kubernetes Job: to the name of pod 0), or give --master HOST:PORT"
        )
    return host, int(port or _PORT)


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list such as `gpu[03-07,12],login`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return prefix.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    first = numbers.partition(",")[0].partition("-")[0]
    return prefix + first + suffix.partition(",")[0]
