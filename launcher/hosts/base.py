"""The operations of the launcher on a host: the contract of `local.py` and `remote.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from launcher.supervisor.processes import ProcessIdentity

ASK_DEADLINE = 10.0
"""Seconds that a question may take by default."""

UNIT_DEADLINE = 60.0
"""Seconds that starting or stopping a unit may take: stopping waits until a worker has ended."""


class Connection(Protocol):
    """What the launcher needs of a host. Paths are absolute paths on that host.

    File methods raise OSError (FileNotFoundError for what is not there); every method of a host
    that does not answer raises UnreachableError, which names it. Safe to use from many threads.
    """

    @property
    def python(self) -> str:
        """The host's interpreter that has the `launcher` package."""
        ...

    @property
    def state_folder(self) -> str:
        """Where this host keeps its runs if the inventory does not set it."""
        ...

    @property
    def user(self) -> str:
        """The user under which all operations run there."""
        ...

    @property
    def units(self) -> bool:
        """Whether processes can be systemd units there; else they are plain sessions."""
        ...

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`."""
        ...

    def size(self, path: str) -> int:
        """Return the bytes that a file has."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no folder."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, for its owner alone; one that exists is left as is."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name exists."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; no error when there is none."""
        ...

    def lock(self, path: str, purpose: str) -> AbstractContextManager[None]:
        """Hold a lock file; the lock is freed when its holder dies or is unreachable.

        Raises:
            PreflightError: another process holds it; its purpose is in the message.
        """
        ...

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process in a session of its own that outlives this connection."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this process runs; a reused pid does not count."""
        ...

    def send_signal(self, process: ProcessIdentity, number: int) -> bool:
        """Signal this process; False when it is gone."""
        ...

    def send_group_signal(self, leader: ProcessIdentity, number: int) -> bool:
        """Signal the process group of this leader; False when it is gone."""
        ...

    def find_run(self, run_id: str) -> list[ProcessIdentity]:
        """Return every living process of a run, wherever it was reparented to."""
        ...

    def describe(self, process: ProcessIdentity) -> str:
        """Return the command name and pid for people."""
        ...

    def ask(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = ASK_DEADLINE
    ) -> Any:
        """Have a question of `queries.py` answered on that host; JSON in, JSON out."""
        ...

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """`start`, `stop` or `kill` a unit of ours; returns when systemd is done.

        Raises:
            PreflightError: there are no units here, or the host refuses; the message says why.
        """
        ...

    def close(self) -> None:
        """Release the host: locks are freed, started processes continue. Idempotent."""
        ...
