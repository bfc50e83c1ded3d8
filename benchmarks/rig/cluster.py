"""Starts a coordinator and workers as real processes, talks to them, and ends them for certain."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.rig.member import MemberSpec
from trainer.system.errors import UnreachableError

COORDINATOR = "coordinator"


class MemberFailedError(UnreachableError):
    """A member ended in a way that the measurement did not expect."""


class LocalCluster:
    """The processes of one measurement; use as a context.

    Args:
        logs: folder for what members write to standard error, of which an error has the last line;
            None lets it through.
        patience: seconds without a word after which the measurement has failed.
    """

    def __init__(self, logs: Path | None = None, patience: float = 60.0) -> None:
        self._logs, self._patience = logs, patience
        self.last_loss: float | None = None
        """Of the last step that the coordinator has told of."""
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lines: queue.SimpleQueue[tuple[str, dict[str, Any] | subprocess.Popen[str]]]
        self._lines = queue.SimpleQueue()
        """What members say, and the process itself once it has said everything."""
        self._open = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(10)
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                continue

    def start(
        self,
        name: str,
        command: Sequence[str],
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process as a member; `inside` is put before its command."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with ExitStack() as stack:
            log = None
            if self._logs is not None:
                log = stack.enter_context((self._logs / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [*inside, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **threads, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the caller, which then ends its members
            )
        self._processes[name] = process
        self._open += 1
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def start_coordinator(self, spec: MemberSpec, inside: Sequence[str] = ()) -> int:
        """Start the coordinator and return its port once it listens."""
        self.start(COORDINATOR, spec.arguments(), inside)
        for _, event in self.events():
            if event["event"] == "listening":
                return int(event["address"].rpartition(":")[2])
        raise MemberFailedError("the coordinator did not listen")

    def start_worker(self, spec: MemberSpec, inside: Sequence[str] = ()) -> None:
        """Start a worker."""
        self.start(f"worker {spec.rank}", spec.arguments(), inside)

    def tell(self, name: str, command: str) -> None:
        """Send a command to a member."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write(command + "\n")
        stdin.flush()

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what members say until all of them ended.

        Raises:
            MemberFailedError: one ended with an error, none wrote anything for too long, or the
                coordinator lost a worker: another takes over its samples, which would wait at a
                gate for both, and what is measured does not count.
        """
        while self._open:
            try:
                name, event = self._lines.get(timeout=self._patience)
            except queue.Empty:
                silence = f"no member wrote anything for {self._patience:g} s"
                raise MemberFailedError(silence) from None
            if isinstance(event, dict):
                if event["event"] == "lost":
                    raise MemberFailedError(f"worker {event['rank']} was lost: {event['reason']}")
                yield name, event
                continue
            self._open -= 1
            if code := event.wait(10):
                raise MemberFailedError(f"{name} ended with {code}{self._last_line(name)}")

    def run_gated(self, workers: int) -> tuple[list[list[dict[str, float]]], list[float]]:
        """Release the gated workers together, step by step, until all members ended.

        Returns:
            For each step the stamps of all workers, and the coordinator's processor seconds.
        """
        stamps: dict[int, list[dict[str, float]]] = {}
        waiting: set[int] = set()
        seconds: list[float] = []
        for _, event in self.events():
            if event["event"] == "ready":
                waiting.add(event["rank"])
                if len(waiting) == workers:
                    for rank in waiting:
                        self.tell(f"worker {rank}", "go")
                    waiting.clear()
            elif event["event"] == "step":
                seconds.append(event["cpu"])
                self.last_loss = event["loss"]
            elif event["event"] == "stamps":
                stamps[event["rank"]] = event["stamps"]
        return [list(step) for step in zip(*stamps.values(), strict=True)], seconds

    def _last_line(self, name: str) -> str:
        """Return the last line of a member's log, after a colon."""
        if self._logs is None:
            return ""
        lines = (self._logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.put((name, json.loads(line)))
        self._lines.put((name, process))


def end_on_terminate() -> None:
    """Let SIGTERM unwind this program as Ctrl-C does, so that it cleans up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
