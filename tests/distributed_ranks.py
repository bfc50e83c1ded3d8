"""Functions of test modules as ranks of torch.distributed.

`Ranks().run("tests.module:function", ...)` calls the function in as many forked processes as the
world has ranks (`tests/forked.py`), and returns their results in order of rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT, become

PATIENCE = 180.0
"""Seconds for a function on all ranks."""
_GRACE = 2.0
"""Seconds for the other ranks after the failure of one, which may be the cause of theirs."""


class RankError(AssertionError):
    """A rank failed or hung; the message has its traceback."""


class Ranks:
    """What runs functions as ranks."""

    def run(
        self, function: str, *arguments: Any, world: int = 2, patience: float = PATIENCE
    ) -> list[Any]:
        """Return what `module:function` returned on each rank.

        Args:
            arguments: what can be pickled; results are what JSON can carry.
            world: how many ranks; 0 for one process outside any group.
            patience: seconds.

        Raises:
            RankError: it raised on a rank, or did not end in time.
        """
        processes: list[BaseProcess] = []
        waiting: dict[Connection, int] = {}
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            Path(folder, "log").touch()
            try:
                for rank in range(world or 1):
                    mine, theirs = CONTEXT.Pipe()
                    process = CONTEXT.Process(
                        target=_be_rank,
                        args=(theirs, rank, world, Path(folder), dict(os.environ), patience),
                        kwargs={"function": function, "arguments": arguments},
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    waiting[mine] = rank
                return _results(waiting, Path(folder, "log"))
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def device_of(rank: int, world: int, gpus: int) -> str:
    """Return a rank's device: a GPU of its own if there is one for every rank."""
    return f"cuda:{rank}" if gpus >= world else "cpu"


def _results(waiting: Mapping[Connection, int], log: Path) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[str] = []
    left = dict(waiting)
    while left and (ready := wait(list(left), _GRACE if errors else None)):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = left.pop(connection)
            try:
                answer = json.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                said = log.read_text(errors="replace")[-4000:]
                answer = {"error": f"rank {rank} ended\n{said}"}
            if "error" in answer:
                errors.append(answer["error"])
            else:
                results[rank] = answer["result"]
    if errors:
        raise RankError("\n".join(errors))
    return [results[rank] for rank in sorted(results)]


def _be_rank(
    theirs: Connection,
    rank: int,
    world: int,
    folder: Path,
    environment: Mapping[str, str],
    patience: float,
    function: str,
    arguments: tuple[Any, ...],
) -> None:
    """Be a rank until the test has heard all answers and ends it."""
    become({**environment, "GLOO_SOCKET_IFNAME": "lo"}, [folder / "log"] * 2)
    faulthandler.dump_traceback_later(patience, exit=True)
    try:
        if world:
            _join_group(rank, world, folder / "store")
        module, _, name = function.partition(":")
        answer = {"result": getattr(importlib.import_module(module), name)(*arguments)}
    except BaseException:
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    theirs.send_bytes(json.dumps(answer).encode())
    faulthandler.cancel_dump_traceback_later()  # its traceback would be among a hanging rank's
    theirs.poll(None)  # another rank may still read from this one


def _join_group(rank: int, world: int, store: Path) -> None:
    import torch
    import torch.distributed as dist

    from trainer.run.distributed.process_group import choose_collectives

    device = torch.device(device_of(rank, world, torch.cuda.device_count()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    file = dist.FileStore(str(store), world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(choose_collectives(device), store=file, rank=rank, world_size=world)
