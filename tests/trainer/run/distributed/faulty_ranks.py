"""Ranks that fail in every way, forked from one process that has imported torch.

    python -m tests.trainer.run.distributed.faulty_ranks FOLDER

Prints one JSON object a case: how each rank ended and what it said. All cases run at once. Rank 1
has the fault; a process that is no rank holds the store, as torchrun does, but for the case in
which the rank that holds it is stopped, or refuses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.ports import free_port
from tests.trainer.run.distributed.faults import CASES, HOLDER, HOLDER_REFUSED, STOPPED
from trainer.run.distributed.rank_watchdog import RankWatch
from trainer.system.errors import RefusedError, TrainerError

WORLD = 3
HANGS = timedelta(seconds=15)
"""Healthy collectives take less on a busy machine, the first of them with its connections too."""
LIVES = timedelta(seconds=120)


def fail(case: str, rank: int) -> None:
    """Fail if it is this rank's turn."""
    if case == HOLDER and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == HOLDER_REFUSED and rank == 0:
        raise RefusedError("the disk is another's")
    if rank != 1:
        return
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "refused":
        raise RefusedError("the disk is another's")
    if case == "defect":
        raise KeyError("nothing")


def be_rank(case: str, rank: int, port: int, folder: Path) -> None:
    """Run collectives until the fault; never returns."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    holds = case in (HOLDER, HOLDER_REFUSED) and rank == 0
    store = TCPStore("127.0.0.1", port, WORLD, holds, wait_for_workers=False)
    store = PrefixStore(case, store)
    watch = RankWatch(store, rank, [f"host{rank}" for rank in range(WORLD)], "cpu", folder)
    code = 0
    try:
        with watch.watch_ranks():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=WORLD,
                timeout=LIVES,
            )
            dist.barrier()  # all are there, so what is late from here on hangs
            group = dist.new_group(timeout=HANGS if case in (STOPPED, HOLDER) else LIVES)
            try:
                with watch.explain_errors():
                    for step in range(100):
                        if step == 2:
                            fail(case, rank)
                        dist.all_reduce(torch.ones(8), group=group)
            finally:
                dist.destroy_process_group()
    except TrainerError as error:
        os.write(2, f"trainer: {error}\n".encode())
        code = error.exit_code
    except Exception as error:
        os.write(2, f"defect: {error!r}\n".encode())
        code = 1
    os._exit(code)


def start(case: str, port: int, folder: Path) -> list[int]:
    """Return the ranks' processes."""
    folder.mkdir(parents=True)
    pids: list[int] = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            be_rank(case, rank, port, folder)
        pids.append(pid)
    return pids


def ends(case: str, pids: list[int], folder: Path) -> dict[str, object]:
    """Return how the ranks ended; one that is stopped is killed once the others are done."""
    stopped = {STOPPED: 1, HOLDER: 0}.get(case)
    codes = [0] * WORLD
    for rank in sorted(range(WORLD), key=lambda rank: rank == stopped):
        if rank == stopped:
            os.kill(pids[rank], signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    return {
        "case": case,
        "codes": codes,
        "said": [(folder / f"{rank}.log").read_text() for rank in range(WORLD)],
        "recorded": sorted(path.name for path in folder.glob("flight-recorder/*")),
    }


def main(root: Path) -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    shared = free_port()
    alone = {case: start(case, free_port(), root / case) for case in (HOLDER, HOLDER_REFUSED)}
    holder = os.fork()  # a process that forks must not have the store's threads
    if holder == 0:
        store = TCPStore("127.0.0.1", shared, 1, True, wait_for_workers=False)
        signal.pause()
        del store
    running = {case: start(case, shared, root / case.replace(" ", "-")) for case in CASES}
    results = [ends(case, pids, root / case.replace(" ", "-")) for case, pids in running.items()]
    results += [ends(case, pids, root / case) for case, pids in alone.items()]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
