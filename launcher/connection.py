"""How the launcher reaches a host. The only file that knows local from remote.

`connect` is the one place where a host becomes a connection; what cannot be driven is refused here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from launcher import processes
from launcher.errors import UnreachableError
from launcher.files import write_atomically
from launcher.inventory import Host
from launcher.processes import ProcessIdentity


class Connection(Protocol):
    """What a supervisor needs from a host. Paths are absolute paths on that host.

    File methods raise OSError (FileNotFoundError for what is not there).
    """

    @property
    def python(self) -> str:
        """The host's interpreter that has the `launcher` package."""
        ...

    def read(self, path: str, offset: int = 0) -> bytes:
        """Return the bytes of a file from `offset` on."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no folder."""
        ...

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process in a session of its own that outlives this connection."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this very process runs; a reused pid is not it."""
        ...

    def send_signal(self, process: ProcessIdentity, number: int) -> bool:
        """Signal this very process; False when it is gone."""
        ...

    def send_group_signal(self, leader: ProcessIdentity, number: int) -> bool:
        """Signal the process group of this very leader; False when it is gone."""
        ...

    def find_run(self, run_id: str) -> list[ProcessIdentity]:
        """Return every living process of a run, wherever it was reparented to."""
        ...


class LocalConnection:
    """This machine."""

    python = sys.executable

    def read(self, path: str, offset: int = 0) -> bytes:
        """Return the bytes of a file from `offset` on."""
        with Path(path).open("rb") as stream:
            stream.seek(offset)
            return stream.read()

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
        """Whether this very process runs; a reused pid is not it."""
        for child in _CHILDREN:  # a keeper of our own that ended must not stay a zombie
            child.poll()
        return processes.is_alive(process)

    def send_signal(self, process: ProcessIdentity, number: int) -> bool:
        """Signal this very process; False when it is gone."""
        return processes.send_signal(process, number)

    def send_group_signal(self, leader: ProcessIdentity, number: int) -> bool:
        """Signal the process group of this very leader; False when it is gone."""
        return processes.send_group_signal(leader, number)

    def find_run(self, run_id: str) -> list[ProcessIdentity]:
        """Return every living process of a run, wherever it was reparented to."""
        return processes.find_run(run_id)


def connect(host: Host) -> Connection:
    """Return a connection to a host.

    Raises:
        UnreachableError: the host cannot be driven.
    """
    if not sys.platform.startswith("linux"):
        raise UnreachableError(f"host {host.name}: hosts need Linux, this is {sys.platform}")
    if not host.is_local:
        raise UnreachableError(
            f"host {host.name}: this release drives only the local machine "
            "(ansible_connection: local); hosts over SSH can be planned with --dry-run"
        )
    return LocalConnection()


def make_private_folder(path: Path) -> None:
    """Make a folder and those above it, for this user alone."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Keepers this process started: kept so that they are reaped, and not warned about."""
