"""Processes of torch.distributed (gloo), for peers and measurements that need real ones."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from trainer.model.layout import GradientLayout

RANKS = 4
ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""The environment of ranks of which each has one thread, on this machine alone."""
_Result = TypeVar("_Result")
_DEADLINE = timedelta(minutes=30)


class Ranks:
    """Processes, which live until the context ends; each call has a group of its own."""

    def __init__(self, count: int = RANKS, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to this process's own."""
        self._count = count
        os.environ |= environment or {}

    def __enter__(self) -> Ranks:
        # The executor, unlike multiprocessing.Pool, ends if a process dies.
        self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return `function(rank, *arguments)` of the first rank, when all have ended."""
        return self.run_all(function, *arguments)[0]

    def run_all(self, function: Callable[..., _Result], *arguments: Any) -> list[_Result]:
        """Return `function(rank, *arguments)` of every rank."""
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            calls = [
                self._pool.submit(_rank, function, rank, self._count, store, arguments)
                for rank in range(self._count)
            ]
            return [call.result() for call in calls]


def _rank(
    function: Callable[..., Any], rank: int, count: int, store: str, arguments: tuple[Any, ...]
) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=_DEADLINE
    )
    try:
        return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


class Trained(nn.Module):
    """A layout's tensors as parameters, and a forward whose gradient is what it is given.

    So peers that wrap a module or an optimizer of torch train the same model, whose gradients
    Motley's replica computes.
    """

    def __init__(self, layout: GradientLayout, weights: np.ndarray) -> None:
        super().__init__()
        self._layout = layout
        self.tensors = nn.ParameterList(
            torch.tensor(weights[slot.start : slot.stop]).view(slot.shape)
            for slot in layout.tensors()
        )

    def forward(self, gradient: np.ndarray) -> torch.Tensor:
        """Return a number whose derivative by the parameters is `gradient`, fp32 `[N]`."""
        parts = zip(self.tensors, self._layout.tensors(), strict=True)
        return torch.stack(
            [
                (tensor * torch.from_numpy(gradient[slot.start : slot.stop]).view(slot.shape)).sum()
                for tensor, slot in parts
            ]
        ).sum()

    def flat(self, *, gradient: bool = False) -> np.ndarray:
        """Return the weights, or their gradient, fp32 `[N]`."""
        found = [tensor.grad if gradient else tensor.data for tensor in self.tensors]
        return torch.cat([part.reshape(-1) for part in found if part is not None]).numpy()
