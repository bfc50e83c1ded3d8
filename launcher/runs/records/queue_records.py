"""The queue of a cluster: what is to run, one after another.

On the coordinator's host, below its state folder, written in one step each:

    <state>/queue/ID.json     a job waits; ID will be the id of its run
    <state>/queue/ID.run      it was claimed, before anything of it is started
    <state>/queue/ID.end      it is over, and how it ended
    <state>/queue/lock        held by the one `launch queue run`, as long as that lives
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from launcher.agent.operations import read_clock
from launcher.errors import ConfigError, PreflightError
from launcher.plan.configuration import JobRequest
from launcher.runs.records.plan_file import MOST
from launcher.runs.records.registry import operator_name
from launcher.runs.records.run import StateFolder
from launcher.runs.records.stored_configs import StartArguments
from trainer.system.commandline.run_id import RUN_ID
from trainer.system.timestamp import format_timestamp
from trainer.system.untrusted_data import UnixTime, validate_json

_FILE = re.compile(rf"({RUN_ID})\.(json|run|end)")
_TORN = re.compile(r"\..+\.[0-9a-f]{8}")
"""Name of a temporary file: being written, or left by a process that was killed."""


@dataclass(frozen=True)
class QueuedJob:
    """A job to run: a `JobRequest` and `StartArguments` that mean the same on any machine."""

    leader: Literal["coordinator", "student"]
    preset: str | None
    config: str | None
    """The text of a config file."""
    settings: dict[str, Any]
    folder: str
    """Where relative paths start."""
    start: StartArguments
    timeout: Annotated[float, Field(ge=0, le=1e9)] | None
    """Seconds for joining."""
    added_by: str
    added_at: UnixTime
    """Unix seconds, by the clock of the coordinator's host."""
    schema: Literal["motley.queue.entry/2"] = "motley.queue.entry/2"

    @contextlib.contextmanager
    def open_request(self) -> Generator[JobRequest]:
        """Yield the order; its config is a file meanwhile."""
        with tempfile.TemporaryDirectory(prefix="motley-") as folder:
            source = self.preset
            if self.config is not None:
                path = Path(folder, "run.yaml")
                path.write_text(self.config, encoding="utf-8")
                source = str(path)
            yield JobRequest(self.leader, source, self.settings, Path(self.folder))


@dataclass(frozen=True)
class JobEnd:
    """How an entry ended."""

    state: str
    """`completed`, `failed` or `stopped`."""
    reason: str | None
    exit_code: int
    """As of `launch cluster up --wait`."""
    run_id: str
    time: UnixTime
    """Unix seconds, by the clock of the coordinator's host."""


@dataclass(frozen=True)
class QueueEntry:
    """A job of the queue, and what has become of it."""

    id: str
    job: QueuedJob
    data: bytes
    """Its file."""
    claimed: bool
    end: JobEnd | None

    @property
    def state(self) -> str:
        """`waiting`, `started`, or the state at its end."""
        return self.end.state if self.end else "started" if self.claimed else "waiting"


class Queue:
    """The folder of a queue; its methods raise UnreachableError if the host does not answer."""

    def __init__(self, place: StateFolder) -> None:
        self.folder = f"{place.folder}/queue"
        self._host = place.connection

    def add(self, run_id: str, data: bytes) -> None:
        """Add a job.

        Raises:
            ConfigError: it could not be read again, or the folder cannot be written: nothing is
                left.
        """
        try:
            validate_json(QueuedJob, data, "the job", lines=True)
        except ValueError as error:
            raise ConfigError(f"it cannot be queued: {error}") from None
        self._write_file(f"{run_id}.json", data)

    def read_entries(self) -> tuple[list[QueueEntry], dict[str, str]]:
        """Return the entries, the oldest first, and what else lies there, each with the reason."""
        names = {*self._host.list_folder(self.folder)} - {"lock"}
        found: list[QueueEntry] = []
        skipped: dict[str, str] = {}
        for name in sorted(names):
            parts = _FILE.fullmatch(name)
            if parts is None:
                torn = _TORN.fullmatch(name)
                skipped[name] = "a write is unfinished" if torn else "not a file of the queue"
            elif parts[2] != "json":
                if f"{parts[1]}.json" not in names:
                    skipped[name] = f"there is no {parts[1]}.json"
            else:
                try:
                    data = self._host.read(self._file_path(name), limit=MOST)
                    job = validate_json(QueuedJob, data, "damaged", lines=True)
                except FileNotFoundError:  # removed meanwhile
                    continue
                except OSError as error:
                    skipped[name] = error.strerror or str(error)
                except ValueError as error:
                    skipped[name] = str(error)
                else:
                    end = self._read_end(parts[1]) if f"{parts[1]}.end" in names else None
                    claimed = f"{parts[1]}.run" in names
                    found.append(QueueEntry(parts[1], job, data, claimed, end))
        return sorted(found, key=lambda entry: (entry.job.added_at, entry.id)), skipped

    def remove(self, run_id: str) -> None:
        """Remove a job that waits or is over.

        Raises:
            ConfigError: there is none of that id.
            PreflightError: it has been claimed.
        """
        entry = next((entry for entry in self.read_entries()[0] if entry.id == run_id), None)
        if entry is None:
            raise ConfigError(f"no {run_id} in the queue (see: launch queue list)")
        busy = PreflightError(
            f"{run_id} has been started; stop it: launch cluster down --run {run_id}"
        )
        if entry.state == "started":
            raise busy
        self._remove_file(f"{run_id}.json")
        # Each side writes first and looks then, so one of them sees the other.
        if entry.end is None and self._host.exists(self._file_path(f"{run_id}.run")):
            self._write_file(f"{run_id}.json", entry.data)
            raise busy
        for kind in ("run", "end"):
            self._remove_file(f"{run_id}.{kind}")

    def claim(self, run_id: str) -> bool:
        """Claim a job for its start; False if it was removed meanwhile."""
        self._write_file(f"{run_id}.run", f"{run_id}\n".encode())
        if self._host.exists(self._file_path(f"{run_id}.json")):
            return True
        self.release(run_id)
        return False

    def release(self, run_id: str) -> None:
        """Take a claim back: nothing was started."""
        self._remove_file(f"{run_id}.run")

    def finish(self, run_id: str, state: str, reason: str | None, exit_code: int) -> None:
        """Record how a job ended."""
        end = JobEnd(state, reason, exit_code, run_id, self.read_clock())
        self._write_file(f"{run_id}.end", json.dumps(asdict(end)).encode())

    def read_clock(self) -> float:
        """Return the time there in Unix seconds."""
        return self._host.ask(read_clock)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Hold the queue, which is freed when its holder dies, whatever the cause.

        Raises:
            PreflightError: another process holds it.
            ConfigError: the folder cannot be written.
        """
        path = self._file_path("lock")
        holder = f"{operator_name()} since {format_timestamp()}"
        with contextlib.ExitStack() as stack:
            with self._report_write_errors():
                try:
                    stack.enter_context(self._host.lock(path, holder))
                except PreflightError:
                    holder = self._host.read(path, limit=200).decode(errors="replace").strip()
                    raise PreflightError(
                        f"another `launch queue run` is running on this queue ({holder})"
                    ) from None
            yield

    def _read_end(self, run_id: str) -> JobEnd:
        name = f"{run_id}.end"
        try:
            return validate_json(
                JobEnd, self._host.read(self._file_path(name), limit=MOST), name, lines=True
            )
        except (OSError, ValueError):
            return JobEnd("over", f"{name} is damaged", 1, run_id, 0.0)

    def _file_path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _write_file(self, name: str, data: bytes) -> None:
        with self._report_write_errors():
            self._host.write(self._file_path(name), data)

    def _remove_file(self, name: str) -> None:
        with self._report_write_errors():
            self._host.remove_file(self._file_path(name))

    @contextlib.contextmanager
    def _report_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"host {self._host.host}: {self.folder} cannot be written: {error.strerror}"
            ) from None
