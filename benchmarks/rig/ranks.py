"""Processes of torch.distributed (gloo), for measurements that need real ones."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist

ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""The environment of ranks of which each has one thread, on this machine alone."""
_Result = TypeVar("_Result")
_DEADLINE = timedelta(minutes=30)


class Ranks:
    """Processes, which live until the context ends; each call has a group of its own."""

    def __init__(self, count: int, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to this process's own."""
        self._count = count
        os.environ |= environment or {}

    def __enter__(self) -> Ranks:
        # The executor, unlike multiprocessing.Pool, ends if a process dies.
        self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

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
