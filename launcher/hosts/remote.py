"""A host at the other end of a pipe, used like the local one: the client of `agent/server.py`.

Any byte pipe works; `ssh.py` makes them from SSH channels.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from launcher.agent import frames
from launcher.agent.operation import DEADLINE
from launcher.errors import PreflightError, UnreachableError
from launcher.hosts.base import UNIT_DEADLINE, Connection
from launcher.hosts.rpc import AgentLink
from trainer.system.untrusted_data import validate_data

MOST_READ = 64 << 20
"""Bytes of one file that are read at most: a host must not fill this machine's memory."""

_UNLOCK_DEADLINE = 2.0

UNITS_MARK = "motley: units"
"""Line before the hello: the operator may start and stop the trainer's units."""

NO_UNITS_MARK = "motley: no units:"
"""Line before the hello: the units are there, and sudo refuses to start them; its reason."""

UNIT_COMMAND = ("sudo", "-n", "/usr/local/sbin/motley-unit")


@dataclass(frozen=True)
class _Hello:
    """An agent's first message."""

    python: Annotated[str, Field(pattern="^/")]  # used in commands; an option begins otherwise
    state_folder: Annotated[str, Field(pattern="^/")]
    user: str
    units: bool


class RemoteConnection(Connection):
    """A host with an agent.

    The next call reopens a broken link. Pending calls fail, and a held lock is lost: every later
    call within its `with` fails.
    """

    def __init__(self, host: str, open_link: Callable[[], AgentLink]) -> None:
        """Take what logs in and starts an agent; `link` calls it, and so does the first call."""
        self.host = host
        self._open_link = open_link
        self._opening = threading.Lock()
        self._closed = False
        self._held: dict[str, AgentLink] = {}
        """The links of held locks, by token."""
        self._link: AgentLink | None = None
        self.marks: tuple[str, ...] = ()
        """Lines of the login shell's command about the agent that it looked for."""

    @property
    def is_spent(self) -> bool:
        """Whether this connection is unusable: closed, or it has lost a lock."""
        return self._closed or any(link.broken is not None for link in self._held.values())

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`; fetched piece by piece."""
        link = self.open_link()
        most = MOST_READ + 1 if limit is None else min(limit, MOST_READ + 1)
        found = bytearray()
        while len(found) < most:
            wanted = min(frames.PIECE, most - len(found))
            where = {"path": path, "offset": offset + len(found), "limit": wanted}
            piece = frames.unpack_bytes(link.call("read", where, DEADLINE))
            found += piece[:wanted]
            if len(piece) < wanted:
                break
        if len(found) > MOST_READ:
            raise OSError(errno.EFBIG, f"longer than {MOST_READ >> 20} MiB", path)
        return bytes(found)

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""
        link = self.open_link()
        token = secrets.token_hex(8)
        last = max(0, (len(data) - 1) // frames.PIECE * frames.PIECE)
        for start in range(0, last, frames.PIECE):
            piece = frames.pack_bytes(data[start : start + frames.PIECE])
            link.call("append", {"token": token, "data": piece}, DEADLINE)
        end = {
            "path": path,
            "data": frames.pack_bytes(data[last:]),
            "token": token if last else None,
        }
        link.call("write", end, DEADLINE)

    @contextlib.contextmanager
    def lock(self, path: str, purpose: str) -> Generator[None]:
        """Hold a lock file; the agent frees it when it ends or the launcher falls silent."""
        link, token = self.open_link(), secrets.token_hex(8)
        try:
            link.call("lock", {"path": path, "purpose": purpose, "token": token}, DEADLINE)
            self._held[token] = link
            yield
        finally:
            self._held.pop(token, None)
            with contextlib.suppress(UnreachableError):
                link.call("unlock", {"token": token}, _UNLOCK_DEADLINE)

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = DEADLINE
    ) -> Any:
        """Have an operation done by the agent; JSON in, JSON out."""
        return self.open_link().call(name, dict(arguments or {}), deadline)

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """`start`, `stop` or `kill` a unit, by the one sudo rule for it, beside the agent."""
        link = self.open_link()
        if not self.units:
            super().control_unit(verb, unit)
        try:
            code, output = link.pipe.run_program((*UNIT_COMMAND, verb, unit), deadline)
        except TimeoutError:
            raise UnreachableError(
                f"host {self.host}: motley-unit {verb} {unit} did not end within {deadline:.0f} s"
            ) from None
        except OSError as error:
            raise UnreachableError(f"host {self.host}: connection lost ({error})") from None
        if code != 0:
            lines = output.strip().splitlines() or [f"exit code {code}"]
            raise PreflightError(f"host {self.host}: motley-unit {verb} {unit}: {lines[-1]}")

    def close(self) -> None:
        """Release the host: locks are freed, started processes continue. Idempotent."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    def open_link(self) -> AgentLink:
        """Return the link, a new one if the last has broken.

        Raises:
            UnreachableError: the host does not answer, or a lock that is held was lost.
            PreflightError: no agent can be started, or it is of another version.
        """
        with self._opening:
            for link in self._held.values():
                if link.broken is not None:
                    raise UnreachableError(f"{link.broken}; the lock held there is lost")
            if self._closed:
                raise UnreachableError(f"host {self.host}: the connection was closed")
            if self._link is None or self._link.broken is not None:
                self._link = self._start_link()
            return self._link

    def _start_link(self) -> AgentLink:
        """Return a new link, of whose agent this connection then has the properties."""
        link = self._open_link()
        schema = link.hello.get("schema")
        try:
            hello = validate_data(
                _Hello if schema == frames.SCHEMA else object, link.hello, "hello"
            )
        except ValueError as error:
            link.close()
            reason = f"its agent sent an invalid reply: {error}"
            raise UnreachableError(f"host {self.host}: {reason}") from None
        if not isinstance(hello, _Hello):
            link.close()
            raise PreflightError(
                f"host {self.host}: Motley {link.hello.get('version')} there uses protocol "
                f"{schema}, this one {frames.SCHEMA}; install the same version on both: launch "
                "cluster push"
            )
        self.python, self.state_folder, self.user = hello.python, hello.state_folder, hello.user
        self.host_key = link.pipe.host_key
        self.marks = tuple(line for line in link.noise if line.startswith("motley: "))
        self.units = hello.units and UNITS_MARK in self.marks
        refusals = [mark for mark in self.marks if mark.startswith(NO_UNITS_MARK)]
        self.units_refusal = refusals[0].removeprefix(NO_UNITS_MARK).strip() if refusals else ""
        self.noise = tuple(line for line in link.noise if line not in self.marks)
        return link
