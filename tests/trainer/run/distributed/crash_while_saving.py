"""Saves a sharded checkpoint again and again, and dies one disk operation later each time.

Two ranks are threads of one process, which is killed (SIGKILL) before rank 0's k-th operation; the
first kills come while a rank's file is begun, and when it is written but not yet told.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from tests.trainer.crash_at_every_step import CountingDisk
from trainer.checkpoint.reader import RunProgress
from trainer.run.distributed import rank_file
from trainer.run.distributed.checkpoint import ShardedCheckpoints
from trainer.run.distributed.rank_notes import RankNotes

WORLD = 2
NAMES = ("a", "b", "c")


def on_ranks(act: Callable[[RankNotes], Any]) -> list[Any]:
    """Return what each rank returns."""
    store = HashStore()
    with ThreadPoolExecutor(WORLD) as ranks:
        calls = [
            ranks.submit(act, RankNotes(store, rank, WORLD, patience=60)) for rank in range(WORLD)
        ]
        return [call.result() for call in calls]


def opened(
    folder: Path, board: RankNotes, step: int, disk: CountingDisk | None
) -> ShardedCheckpoints:
    parts = {name: torch.full((3, 4), float(step)) for name in NAMES}
    used = disk if board.rank == 0 else None
    return ShardedCheckpoints(folder, parts, "layout", board, keep_last=1, disk=used)


def save(folder: Path, step: int, disk: CountingDisk | None = None) -> None:
    def act(board: RankNotes) -> None:
        checkpoints = opened(folder, board, step, disk)
        if disk is not None and board.rank == 0:
            disk.count_anew(disk.before)
        checkpoints.save(RunProgress("run", step, 0, 0, 0, 0, {}))
        checkpoints.close()

    on_ranks(act)


def restore(folder: Path) -> list[Any]:
    """Return each rank's step and values."""

    def act(board: RankNotes) -> Any:
        checkpoints = opened(folder, board, 0, None)
        resumed = checkpoints.restore("run")
        checkpoints.close()
        values = {float(value) for part in checkpoints._parts.values() for value in part.unique()}
        return [resumed and resumed.progress.step, sorted(values)]

    return on_ranks(act)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash(folder: Path, k: int) -> None:
    """Save step 2 and die at the k-th place, if there are so many."""
    write = rank_file.RankWriter.write_data

    def begun(writer: Any, *arguments: Any) -> Any:
        if writer._shard == 2:
            (Path(writer.path) / "shard-00002-model-00001-of-00001.safetensors").touch()
            die()
        return write(writer, *arguments)

    def written(writer: Any, *arguments: Any) -> Any:
        result = write(writer, *arguments)
        result.wait()
        if writer._shard == 2:
            die()
        return result

    if k <= 2:
        rank_file.RankWriter.write_data = (begun, written)[k - 1]  # type: ignore[method-assign]  # the fault
    disk = CountingDisk(lambda count, *_: die() if count == k - 2 else None)
    save(folder, 2, disk)


def die_at_every_place(into: str) -> list[dict[str, Any]]:
    """Return, for each place to die, what a restarted job finds; to be called in a fork."""
    root, results = Path(into), list[dict[str, Any]]()
    warnings.simplefilter("error", append=True)  # except what is silenced on purpose
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    saved = root / "0"
    assert in_a_fork(save, saved, 1) == 0
    k, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        k += 1
        folder = root / str(k)
        shutil.copytree(saved, folder, symlinks=True)
        status = in_a_fork(crash, folder, k)
        note = root / f"{k}.json"
        assert in_a_fork(look, folder, note) == 0
        results.append({"k": k, "exit_code": status, **json.loads(note.read_text())})
    return results


def look(folder: Path, note: Path) -> None:
    found = restore(folder)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    note.write_text(json.dumps({"found": found, "hidden": hidden}))


def in_a_fork(act: Callable[..., object], *arguments: object) -> int:
    """Return the exit code, as of `subprocess`."""
    if (pid := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # replaces the pool, which two threads would do at once
            act(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
