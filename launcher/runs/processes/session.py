"""Start, stop and inspect the processes of a run on one host.

`SessionSupervisor` gives each process a supervisor of its own
(`session/process_supervisor.py`): no root, no systemd. `systemd.py` has systemd run the same.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import get_args

from launcher.agent.operations import send_group_signal, send_signal
from launcher.errors import PartialError
from launcher.hosts.base import Connection
from launcher.plan.plan import ProcessPlan
from launcher.session.log_index import find_offset, marks_name
from launcher.session.processes import RUN_VARIABLE, ProcessIdentity
from launcher.session.spec import (
    FINAL_PHASES,
    LONGEST_SAVE,
    SAVING,
    Phase,
    RestartPolicy,
    SessionSpec,
    log_name,
)
from trainer.system.untrusted_data import parse_json, validate_data

POLL = 0.05
_START_DEADLINE = 60.0
"""Seconds for a supervisor's first sign of life: a host under heavy load takes half a minute."""
_MOST_STATE = 1 << 16
"""Bytes that a state.json may have."""

SUPERVISOR_LOST = "its supervisor was killed, or its host restarted"
_CAUSES = {signal.SIGBUS.value: ": a file that it read was cut short, or its disk failed"}
"""Causes by signal; SIGBUS: a page of mapped weights that the file has lost."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """The known state of one process of a run."""

    state: str
    """`absent` (never started), `starting`, `running`, `backoff`, `stopping`, `exited` (0),
    `failed` (for good), `stopped` (asked to), `lost`: its supervisor was killed, or `unreachable`:
    its host does not answer."""
    attempt: int = 0
    failures: int = 0
    supervisor: ProcessIdentity | None = None
    child: ProcessIdentity | None = None
    exit_code: int | None = None
    """How the last ended attempt ended, while a new one may run."""
    signal: int | None = None
    started: float | None = None
    """Unix seconds of the current attempt."""
    message: str | None = None
    progress: str | None = None
    """How far a process is that reads data, in a line; every change is a sign of life."""
    notify_failure: str | None = None
    """Why the command for notifications failed when the supervisor had given up."""

    @property
    def is_over(self) -> bool:
        """Whether no attempt runs and none will follow."""
        return self.state in FINAL_PHASES or self.state in ("absent", "lost")

    @property
    def last_end(self) -> str:
        """How the last attempt ended, for people; empty when none has."""
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}{_CAUSES.get(self.signal, '')}"
        return "" if self.exit_code is None else f"exit code {self.exit_code}"


class SessionSupervisor:
    """Processes under plain supervisors; state and logs are files in the process's folder."""

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        restart: RestartPolicy | None = None,
        grace: float = SessionSpec.grace_seconds,
        home: str = "",
    ) -> None:
        """`home` is where the host keeps the run: there lie processes whose plan does not say."""
        self.connection = connection
        self.run_id = run_id
        self._home = home
        self._restart = restart or RestartPolicy()
        self._grace = grace

    def start_process(
        self, process: ProcessPlan, leader: ProcessPlan | None = None, notify: Sequence[str] = ()
    ) -> None:
        """Start a process and keep it running; returns once it is supervised.

        `leader` is a process of this host; once its state.json says that it has ended for good,
        this one ends too. State and logs of an earlier start of the process do not matter.
        `notify` is a command that is told if the supervisor gives up.

        Raises:
            PartialError: the supervisor did not start; the message has its last output.
            OSError: the host's disk does not take the spec.
        """
        spec = SessionSpec(
            name=process.name,
            run_id=self.run_id,
            argv=process.argv,
            env=dict(process.env),
            folder=process.folder,
            grace_seconds=self._grace,
            restart=self._restart,
            leader_state=None if leader is None else f"{leader.folder}/state.json",
            stop_file=str(PurePosixPath(process.folder).parents[1] / "down"),
            notify=tuple(notify),
        )
        self.connection.write(f"{process.folder}/state.json", b"")  # of an earlier start
        self.connection.write(f"{process.folder}/spec.json", spec.to_json())
        self.start_supervisor(process)
        deadline = time.monotonic() + _START_DEADLINE
        while not self._read_log(f"{process.folder}/state.json"):
            if time.monotonic() > deadline:
                raise self.start_error(process)
            time.sleep(POLL / 5)

    def start_supervisor(self, process: ProcessPlan) -> None:
        """Start the supervisor of a process whose spec has been written."""
        argv = (self.connection.python, "-P", "-m", "launcher.session")
        path, log = (
            f"{self.process_folder(process)}/spec.json",
            f"{self.process_folder(process)}/supervisor.log",
        )
        self.connection.spawn_process((*argv, path), {RUN_VARIABLE: self.run_id}, log)

    def start_error(self, process: ProcessPlan) -> PartialError:
        """Return the error of a supervisor that wrote no state, with its last output."""
        text = self._read_log(f"{self.process_folder(process)}/supervisor.log").decode(
            errors="replace"
        )
        words = text.strip().splitlines()
        reason = words[-1] if words else f"no state and no output within {_START_DEADLINE:.0f} s"
        return PartialError(f"{process.name}: its supervisor did not start: {reason}")

    def read_state(self, process: ProcessPlan) -> ProcessState:
        """Return what is known about a process, also one that was never started.

        It is what the supervisor wrote, checked against the running processes.
        """
        try:
            written = self._read_written_state(process)
            if written is None or written.is_over or _is_alive(self.connection, written.supervisor):
                return written or ProcessState(state="absent")
            # It may have written its last state between the read and this check.
            again = self._read_written_state(process) or written
        except ValueError as error:
            return ProcessState(state="lost", message=str(error))
        return again if again.is_over else replace(again, state="lost", message=SUPERVISOR_LOST)

    def _read_written_state(self, process: ProcessPlan) -> ProcessState | None:
        """Return what the supervisor wrote; None when there is nothing yet.

        Raises:
            ValueError: it is damaged.
        """
        text = self._read_log(f"{self.process_folder(process)}/state.json", limit=_MOST_STATE)
        if not text:
            return None
        state = validate_data(ProcessState, parse_json(text, "state.json"), "state.json")
        if state.state not in get_args(Phase):
            raise ValueError(f"state.json: unknown state {state.state}")
        return state

    def stop_processes(self, plans: Iterable[ProcessPlan], grace: float) -> None:
        """Ask processes to end, and end them by force after `grace` seconds. Idempotent.

        SIGTERM goes to every supervisor at once, SIGKILL to it and its child group. A process that
        is saving gets up to `LONGEST_SAVE` seconds for it, and the grace again after that.
        """
        living = [
            (process, state)
            for process in plans
            if (state := self.read_state(process)).supervisor and not state.is_over
        ]
        for _, state in living:
            if state.supervisor:
                self.connection.ask(send_signal, state.supervisor, signal.SIGTERM)
                self.connection.ask(send_signal, state.supervisor, signal.SIGCONT)
        self.wait_until_stopped([process for process, _ in living], grace)
        for process, _ in living:
            state = self.read_state(process)
            if state.supervisor:
                self.connection.ask(send_signal, state.supervisor, signal.SIGKILL)
            if state.child:
                self.connection.ask(send_group_signal, state.child, signal.SIGKILL)

    def wait_until_stopped(self, plans: Iterable[ProcessPlan], grace: float) -> None:
        """Wait until the supervisors are gone: `grace` seconds, and while they save."""
        supervisors = [(process, self.read_state(process).supervisor) for process in plans]
        until = time.monotonic() + grace
        last, saved = until + LONGEST_SAVE, False
        while left := [p for p, k in supervisors if k and self.connection.is_alive(k)]:
            now = time.monotonic()
            if now >= until:
                saves = any(self._is_saving(process) for process in left)
                if now >= last or not (saves or saved):
                    return
                # A process that has just ended its save gets the grace again, to end by itself.
                until, saved = min(now + grace, last), saves
            time.sleep(POLL)

    def _is_saving(self, process: ProcessPlan) -> bool:
        return self.connection.exists(f"{self.process_folder(process)}/{SAVING}")

    def process_folder(self, process: ProcessPlan) -> str:
        """Return the folder of a process's state, logs and certificates."""
        if not (process.folder or self._home):
            raise ValueError(f"{process.name}: its plan names no folder, and no default is given")
        return process.folder or f"{self._home}/processes/{process.name}"

    def list_attempts(self, process: ProcessPlan) -> list[int]:
        """Return the numbers of the attempts that have a log, in order."""
        names = self.connection.list_folder(self.process_folder(process))
        found = [re.fullmatch(r"attempt-([0-9]{1,9})\.log", name) for name in names]
        return sorted(int(match[1]) for match in found if match)

    def read_log(
        self, process: ProcessPlan, attempt: int, offset: int = 0, limit: int | None = None
    ) -> bytes:
        """Return an attempt's output from a byte offset on; empty when there is none yet."""
        return self._read_log(f"{self.process_folder(process)}/{log_name(attempt)}", offset, limit)

    def log_size(self, process: ProcessPlan, attempt: int) -> int:
        """Return how many bytes an attempt has written; 0 when there is no log yet."""
        try:
            return self.connection.file_size(f"{self.process_folder(process)}/{log_name(attempt)}")
        except FileNotFoundError:
            return 0

    def log_offset(self, process: ProcessPlan, attempt: int, moment: float) -> int | None:
        """Return from where on an attempt's output is younger than a Unix time of its host.

        It may be up to `log_index.GRANULARITY` seconds older; None when unknown.
        """
        path = f"{self.process_folder(process)}/{marks_name(log_name(attempt))}"
        return find_offset(self._read_log(path), moment)

    def _read_log(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
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


def _is_alive(connection: Connection, supervisor: ProcessIdentity | None) -> bool:
    return supervisor is not None and connection.is_alive(supervisor)
