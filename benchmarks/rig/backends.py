"""The comparable ways to sum a gradient, and their requirements."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks.rig.interface import INTERFACE

Name = Literal["ours", "gloo", "nccl", "mpi"]


@dataclass(frozen=True)
class Backend:
    """One way."""

    title: str
    limit: Callable[[int], float]
    """Gradients that the busiest link carries in one direction, by the number of workers."""
    missing: Callable[[int], str | None]
    """What this machine lacks for so many workers, and how to get it; None if nothing."""


def mpiexec() -> str | None:
    """Return MPI's launcher: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi_environment(*, shaped: bool) -> Mapping[str, str]:
    """Return what makes MPICH start ranks itself and, if shaped, take the network between them.

    Ranks of one machine would otherwise share memory.
    """
    found = {"HYDRA_LAUNCHER": "fork"}
    if shaped:
        found |= {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"}
        found |= {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": INTERFACE}
    return found


def nccl_environment(*, shaped: bool) -> Mapping[str, str]:
    """Return what makes NCCL take the network, if it is shaped, between devices of one machine."""
    return {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"} if shaped else {}


def _star(workers: int) -> float:
    """Return the busiest link's load: the coordinator's, on the first worker's host."""
    return float(max(1, workers - 1))


def _ring(workers: int) -> float:
    """Return the least of any all-reduce without a centre (Patarasuk and Yuan, 2009)."""
    return 2 * (workers - 1) / workers


def _no_torch(_workers: int) -> str | None:
    return None if find_spec("torch") else "torch is missing: pip install 'motley[trainer]'"


def _no_nccl(workers: int) -> str | None:
    if reason := _no_torch(workers):
        return reason
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "NCCL needs NVIDIA devices and torch's build for CUDA: make setup TORCH=cuda"
    if (count := torch.cuda.device_count()) < workers:
        return f"NCCL needs a device for each worker, there are {count}: --workers {count}"
    return None


def _no_mpi(_workers: int) -> str | None:
    if find_spec("mpi4py") is None or mpiexec() is None:
        lacking = "mpi4py" if find_spec("mpi4py") is None else "mpiexec"
        return f"{lacking} is missing: pip install 'motley[compare]' has mpi4py and MPICH"
    return None


BACKENDS: dict[Name, Backend] = {
    "ours": Backend("Motley's star", _star, _no_torch),
    "gloo": Backend("gloo", _ring, _no_torch),
    "nccl": Backend("NCCL", _ring, _no_nccl),
    "mpi": Backend("MPI", _ring, _no_mpi),
}
