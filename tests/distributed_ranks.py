"""Ranks of torch.distributed for tests: forked once from a parent that has imported torch.

`Ranks(2).run("tests.module:function", ...)` calls the function on both ranks of a world and
returns their results in order of rank. The ranks stay for the next test, so that one costs no
start of a process; a failure, a rank that hangs or a pause ends them, and the next test forks new
ones.
With `world=0` the function runs in a process of its own, without a group.

As a program, it is that parent: `python -m tests.distributed_ranks` (see `ForkServer` of the
cluster tests for what a fork must not have).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests import ROOT

PATIENCE = 180.0
"""Seconds for a function on all ranks; after a rank's failure, others have a fraction of it."""
_GRACE = 2.0
IDLE = 3.0
"""Seconds that ranks stay without a request: a thread of gloo for each group looks for events a
hundred times a second, and six idle ranks took a twelfth of a core."""
_STACKS = 20.0
"""Seconds for a rank to say where it is: on a busy machine a signal waits its turn."""
_MODULES = (
    "pytest",
    "trainer.run.composition.run",
    "trainer.run.composition.roles",
    "trainer.run.composition.distributed",
    "trainer.run.distributed.run",
    "trainer.replica.torch.parallel.replica",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "tensorboard.summary.writer.record_writer",
)
"""Imported before the fork, with what they import."""


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check opens the driver, before the fork
}


class RankError(AssertionError):
    """A rank failed or hung; the message has its traceback."""


class Ranks:
    """The parent and its worlds; ends with the process that made it, or at `close`.

    Args:
        environment: the parent's, over this process's.
    """

    def __init__(self, **environment: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed_ranks"],
                cwd=ROOT,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
            )

    def run(
        self, function: str, *arguments: Any, world: int = 2, patience: float = PATIENCE
    ) -> list[Any]:
        """Return what `module:function` returned on each rank.

        Args:
            arguments: what JSON can carry, as must be the results.
            world: how many ranks; 0 for one process outside any group, and for this call alone.
            patience: seconds.

        Raises:
            RankError: it raised on a rank, or did not end in time.
        """
        request = {
            "world": world,
            "function": function,
            "arguments": arguments,
            "patience": patience,
        }
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._lines.readline()
        assert line, "the parent of the ranks has ended"
        answers = json.loads(line)
        failures = [answer["error"] for answer in answers if "error" in answer]
        if failures:
            raise RankError("\n".join(failures))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.wait(60)


def device_of(rank: int, world: int, gpus: int) -> str:
    """Return a rank's device: a GPU of its own if there is one for every rank."""
    return f"cuda:{rank}" if gpus >= world else "cpu"


class _World:
    """The forked ranks of one size."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.log = Path(self.folder.name, "log")
        self._sockets: list[socket.socket] = []
        self._pids: list[int] = []
        for rank in range(size or 1):
            mine, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                mine.close()
                for other in self._sockets:
                    other.close()
                _serve_rank(theirs, rank, size, Path(self.folder.name))
            theirs.close()
            self._sockets.append(mine)
            self._pids.append(pid)

    def run(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answers; the world is over if one of them is an error."""
        line = json.dumps(request).encode() + b"\n"
        for mine in self._sockets:
            with contextlib.suppress(BrokenPipeError):
                mine.sendall(line)
        answers: dict[int, dict[str, Any]] = {}
        heard = [b"" for _ in self._sockets]
        deadline = time.monotonic() + request["patience"]
        with selectors.DefaultSelector() as selector:
            for rank, mine in enumerate(self._sockets):
                selector.register(mine, selectors.EVENT_READ, rank)
            while len(answers) < len(self._sockets):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    break
                for key, _ in ready:
                    rank = key.data
                    piece = self._sockets[rank].recv(1 << 20)
                    heard[rank] += piece
                    if not piece:
                        answers[rank] = {"error": f"rank {rank} ended\n{self._tail()}"}
                    elif heard[rank].endswith(b"\n"):
                        answers[rank] = json.loads(heard[rank])
                    if rank in answers:
                        selector.unregister(self._sockets[rank])
                        if "error" in answers[rank]:
                            deadline = min(deadline, time.monotonic() + _GRACE)
        failed = any("error" in answer for answer in answers.values())
        for rank in range(len(self._sockets)):
            if rank not in answers:
                text = f"rank {rank} hangs"
                text += " since another one failed" if failed else f":\n{self._stacks(rank)}"
                answers[rank] = {"error": text}
        return [answers[rank] for rank in range(len(self._sockets))]

    def close(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        for mine in self._sockets:
            mine.close()
        self.folder.cleanup()

    def _stacks(self, rank: int) -> str:
        """Return where a rank is."""
        before, deadline = self.log.stat().st_size, time.monotonic() + _STACKS
        os.kill(self._pids[rank], signal.SIGUSR1)
        while self.log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # the rest of the lines
        return self._tail()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def _serve_rank(theirs: socket.socket, rank: int, size: int, folder: Path) -> None:
    """Be a rank; never returns."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    import torch
    import torch.distributed as dist

    from trainer.run.distributed.process_group import collectives

    torch.set_num_threads(1)
    if size:
        device = torch.device(device_of(rank, size, torch.cuda.device_count()))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        file = str(folder / "store")
        store = dist.FileStore(file, size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(collectives(device), store=store, rank=rank, world_size=size)
    with theirs.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            module, _, name = request["function"].partition(":")
            try:
                function = getattr(importlib.import_module(module), name)
                answer = {"result": function(*request["arguments"])}
            except BaseException:
                answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
            theirs.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Serve requests until the other end is closed."""
    import torch

    from trainer.replica.torch.linear import import_bitsandbytes

    for module in _MODULES:
        importlib.import_module(module)
    if not torch.cuda.device_count():  # it opens every GPU, after which a fork cannot
        import_bitsandbytes()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every page
    requests = socket.socket(fileno=0)
    worlds: dict[int, _World] = {}
    with requests.makefile("rb") as lines:
        while True:
            if worlds and not select.select([requests], [], [], IDLE)[0]:
                _close(worlds)
            line = lines.readline()
            if not line:
                break
            request = json.loads(line)
            size = request["world"]
            if size not in worlds:
                with contextlib.suppress(Exception):  # a rank reports it
                    importlib.import_module(request["function"].partition(":")[0])
                worlds[size] = _World(size)
            answers = worlds[size].run(request)
            if size == 0 or any("error" in answer for answer in answers):
                worlds.pop(size).close()
            requests.sendall(json.dumps(answers).encode() + b"\n")
    _close(worlds)


def _close(worlds: dict[int, _World]) -> None:
    for world in worlds.values():
        world.close()
    worlds.clear()


if __name__ == "__main__":
    main()
