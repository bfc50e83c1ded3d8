"""Start, stop and inspect the processes of a run on one host.

`SessionSupervisor` gives each process a keeper of its own (`session.py`): no root, no systemd.
`units.py` has systemd run the same keepers.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from launcher.access import Connection
from launcher.errors import PartialError
from launcher.log_marks import marks_name, offset_at
from launcher.plan import ProcessPlan
from launcher.processes import RUN_VARIABLE, ProcessIdentity
from launcher.session_spec import FINAL_PHASES, RestartPolicy, SessionSpec, log_name

POLL = 0.05
_START_DEADLINE = 15.0


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What is known about one process of a run."""

    state: str
    """`absent` (never started), `starting`, `running`, `backoff`, `stopping`, `exited` (0),
    `failed` (for good), `stopped` (asked to), `lost`: its keeper was killed, or `unreachable`: its
    host does not answer."""
    attempt: int = 0
    failures: int = 0
    keeper: ProcessIdentity | None = None
    child: ProcessIdentity | None = None
    exit_code: int | None = None
    """How the last ended attempt ended, while a new one may run."""
    signal: int | None = None
    started: float | None = None
    """Unix seconds of the current attempt."""
    message: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing will be started again."""
        return self.state in FINAL_PHASES or self.state in ("absent", "lost")

    @property
    def ending(self) -> str:
        """How the last attempt ended, for people; empty when none has."""
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return "" if self.exit_code is None else f"exit code {self.exit_code}"


class Supervisor(Protocol):
    """The processes of one run on one host. One contract test runs every implementation."""

    def start(self, process: ProcessPlan, leader: ProcessPlan | None = None) -> None:
        """Start a process and keep it running; returns once its supervision has begun.

        `leader` is a process of this host with whose end for good this one ends too. What an
        earlier start of the same process left (state, logs) is no hindrance.
        """
        ...

    def state(self, process: ProcessPlan) -> ProcessState:
        """Return what is known about a process, also one that was never started."""
        ...

    def stop(self, plans: Iterable[ProcessPlan], grace: float) -> None:
        """Ask processes to end, and end them by force after `grace` seconds. Idempotent."""
        ...

    def attempts(self, process: ProcessPlan) -> list[int]:
        """Return the numbers of the attempts that have a log."""
        ...

    def read_log(
        self, process: ProcessPlan, attempt: int, offset: int = 0, limit: int | None = None
    ) -> bytes:
        """Return an attempt's output from a byte offset on; empty when there is none yet."""
        ...

    def log_size(self, process: ProcessPlan, attempt: int) -> int:
        """Return how many bytes an attempt has written; 0 when there is no log yet."""
        ...

    def log_offset(self, process: ProcessPlan, attempt: int, moment: float) -> int | None:
        """Return from where on an attempt's output is younger than a Unix time of its host.

        It may be up to `log_marks.GRANULARITY` seconds older; None when nobody knows.
        """
        ...


class SessionSupervisor:
    """Processes under plain-session keepers; state and logs are files in the process's folder."""

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        restart: RestartPolicy | None = None,
        grace: float = 15.0,
    ) -> None:
        self.connection = connection
        self.run_id = run_id
        self._restart = restart or RestartPolicy()
        self._grace = grace

    def start(self, process: ProcessPlan, leader: ProcessPlan | None = None) -> None:
        """Start a keeper for the process; it looks after its leader's state.json by itself.

        Raises:
            PartialError: the keeper did not come up; its own words are in the message.
            OSError: the host's disk does not take the spec.
        """
        spec = SessionSpec(
            name=process.name,
            run_id=self.run_id,
            argv=process.argv,
            env=dict(process.env),
            folder=process.folder,
            grace=self._grace,
            restart=self._restart,
            leader=None if leader is None else f"{leader.folder}/state.json",
            ended=str(PurePosixPath(process.folder).parents[1] / "down"),
        )
        self.connection.write(f"{process.folder}/state.json", b"")  # of an earlier start
        self.connection.write(f"{process.folder}/spec.json", spec.to_json())
        self.begin(process)
        deadline = time.monotonic() + _START_DEADLINE
        while not self._read(f"{process.folder}/state.json"):
            if time.monotonic() > deadline:
                raise self.complain(process)
            time.sleep(POLL / 5)

    def begin(self, process: ProcessPlan) -> None:
        """Start the keeper of a process whose spec lies ready."""
        argv = (self.connection.python, "-P", "-m", "launcher.session")
        path, log = f"{process.folder}/spec.json", f"{process.folder}/keeper.log"
        self.connection.spawn((*argv, path), {RUN_VARIABLE: self.run_id}, log)

    def complain(self, process: ProcessPlan) -> PartialError:
        """Return the error of a keeper that gives no sign of life, in its own words."""
        text = self._read(f"{process.folder}/keeper.log").decode(errors="replace")
        words = text.strip().splitlines()
        reason = words[-1] if words else f"no sign of life in {_START_DEADLINE:.0f} s"
        return PartialError(f"{process.name}: its keeper did not start: {reason}")

    def state(self, process: ProcessPlan) -> ProcessState:
        """Return what the keeper wrote, checked against the processes that really live."""
        text = self._read(f"{process.folder}/state.json")
        if not text:
            return ProcessState(state="absent")
        tree: dict[str, Any] = json.loads(text)
        keeper, child = _identity(tree["keeper"]), _identity(tree["child"])
        state: str = tree["state"]
        if state not in FINAL_PHASES and not (keeper and self.connection.is_alive(keeper)):
            # It may have written its last words between our read and our look.
            again: dict[str, Any] = json.loads(self._read(f"{process.folder}/state.json"))
            tree = again
            state = tree["state"] if tree["state"] in FINAL_PHASES else "lost"
        return ProcessState(
            state=state,
            attempt=tree["attempt"],
            failures=tree["failures"],
            keeper=keeper,
            child=child,
            exit_code=tree["exit_code"],
            signal=tree["signal"],
            started=tree["started"],
            message=tree["message"],
        )

    def stop(self, plans: Iterable[ProcessPlan], grace: float) -> None:
        """SIGTERM to every keeper at once; after `grace` SIGKILL to keeper and child group."""
        living = [
            (process, state)
            for process in plans
            if (state := self.state(process)).keeper and not state.is_over
        ]
        for _, state in living:
            if state.keeper:
                self.connection.send_signal(state.keeper, signal.SIGTERM)
                self.connection.send_signal(state.keeper, signal.SIGCONT)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            if not any(s.keeper and self.connection.is_alive(s.keeper) for _, s in living):
                return
            time.sleep(POLL)
        for process, _ in living:
            state = self.state(process)
            if state.keeper:
                self.connection.send_signal(state.keeper, signal.SIGKILL)
            if state.child:
                self.connection.send_group_signal(state.child, signal.SIGKILL)

    def attempts(self, process: ProcessPlan) -> list[int]:
        """Return the numbers of the attempts that have a log, in order."""
        numbers = [
            name.removeprefix("attempt-").removesuffix(".log")
            for name in self.connection.names(process.folder)
        ]
        return sorted(int(number) for number in numbers if number.isdigit())

    def read_log(
        self, process: ProcessPlan, attempt: int, offset: int = 0, limit: int | None = None
    ) -> bytes:
        """Return an attempt's output from a byte offset on; empty when there is none yet."""
        return self._read(f"{process.folder}/{log_name(attempt)}", offset, limit)

    def log_size(self, process: ProcessPlan, attempt: int) -> int:
        """Return how many bytes an attempt has written; 0 when there is no log yet."""
        try:
            return self.connection.size(f"{process.folder}/{log_name(attempt)}")
        except FileNotFoundError:
            return 0

    def log_offset(self, process: ProcessPlan, attempt: int, moment: float) -> int | None:
        """Return from where on an attempt's output is younger than a moment, by its marks."""
        return offset_at(self._read(f"{process.folder}/{marks_name(log_name(attempt))}"), moment)

    def _read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        try:
            return self.connection.read(path, offset, limit)
        except FileNotFoundError:
            return b""


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _identity(tree: dict[str, Any] | None) -> ProcessIdentity | None:
    return None if tree is None else ProcessIdentity(**tree)
