"""This machine as a host. Standard library only: the agent needs only that."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import PreflightError
from launcher.files import default_state_folder, make_private_folder, write_atomically
from launcher.hosts.base import ASK_DEADLINE, UNIT_DEADLINE
from launcher.hosts.queries import answer
from launcher.supervisor import processes
from launcher.supervisor.processes import ProcessIdentity


class LocalConnection:
    """This machine, as this user."""

    python = sys.executable
    units = False

    @property
    def state_folder(self) -> str:
        """Where this user keeps its runs."""
        return str(default_state_folder())

    @property
    def user(self) -> str:
        """The name of this user; the number of a user without a name."""
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return str(os.getuid())

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`."""
        with Path(path).open("rb") as stream:
            stream.seek(offset)
            return stream.read(limit)

    def size(self, path: str) -> int:
        """Return the bytes that a file has."""
        return Path(path).stat().st_size

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""
        target = Path(path)
        make_private_folder(target.parent)
        write_atomically(target, data)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no folder."""
        try:
            return sorted(entry.name for entry in Path(folder).iterdir())
        except FileNotFoundError:
            return []

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, for this user alone; one that exists is left as is."""
        make_private_folder(Path(path))

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name exists, a dangling link included."""
        return os.path.lexists(path)

    def remove(self, path: str) -> None:
        """Remove a file; no error when there is none."""
        Path(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, path: str, purpose: str) -> Generator[None]:
        """Hold a lock file; the kernel frees it when its holder dies, whatever the cause.

        Raises:
            PreflightError: another process is starting a run.
            OSError: the file cannot be made or written.
        """
        make_private_folder(Path(path).parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise PreflightError(
                    f"another launch is starting a run here ({holder or 'just now'}); "
                    "see: launch cluster status"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{purpose}, pid {os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process in a session of its own: no terminal, no stdin, output to `log`."""
        with Path(log).open("ab") as output:
            keeper = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={**os.environ, **env},
                start_new_session=True,
            )
        _CHILDREN.append(keeper)

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this process runs; a reused pid does not count."""
        for child in _CHILDREN:  # a supervisor of our own that ended must not stay a zombie
            child.poll()
        return processes.is_alive(process)

    def send_signal(self, process: ProcessIdentity, number: int) -> bool:
        """Signal this process; False when it is gone."""
        return processes.send_signal(process, number)

    def send_group_signal(self, leader: ProcessIdentity, number: int) -> bool:
        """Signal the process group of this leader; False when it is gone."""
        return processes.send_group_signal(leader, number)

    def find_run(self, run_id: str) -> list[ProcessIdentity]:
        """Return every living process of a run, wherever it was reparented to."""
        return processes.find_run(run_id)

    def describe(self, process: ProcessIdentity) -> str:
        """Return the command name and pid for people."""
        return processes.describe(process)

    def ask(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = ASK_DEADLINE
    ) -> Any:
        """Answer a question in this thread; the caller enforces the deadline."""
        del deadline
        found = answer(name, dict(arguments or {}))
        return json.loads(json.dumps(found))  # the same types as from a remote host

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """Refuse: on the launcher's own machine processes are plain sessions."""
        del deadline
        raise PreflightError(f"cannot {verb} {unit}: the local connection uses no systemd units")

    def close(self) -> None:
        """Nothing to release."""


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started: kept so that they are reaped without a warning."""
