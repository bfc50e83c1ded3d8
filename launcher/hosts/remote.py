"""A host at the other end of a pipe, used like the local one: the client of `agent.py`.

Any byte pipe works; `ssh.py` makes them from SSH channels.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from launcher.agent import frames
from launcher.errors import PreflightError, UnreachableError
from launcher.hosts.base import CALL_DEADLINE, UNIT_DEADLINE, Connection
from launcher.hosts.rpc import AgentLink
from trainer.system.received import receive

MOST_READ = 64 << 20
"""Bytes of one file that are read at most: a host must not fill this machine's memory."""

_UNLOCK_DEADLINE = 2.0
_PATH = re.compile(r"/[^\x00-\x1f\x7f-\x9f]{0,4095}")
"""An absolute path; an option begins otherwise."""

UNITS_MARK = "motley: units"
"""Line before the hello: the operator may start and stop the trainer's units."""

UNIT_COMMAND = ("sudo", "-n", "/usr/local/sbin/motley-unit")


class RemoteConnection(Connection):
    """A host with an agent.

    The next call reopens a broken link. Pending calls fail, and a held lock is lost: every later
    call within its `with` fails.
    """

    def __init__(self, host: str, open_link: Callable[[], AgentLink]) -> None:
        """Open the first link.

        Raises:
            UnreachableError, PreflightError: as `open_link`, or the agent is of another version.
        """
        self.host = host
        self._open_link = open_link
        self._opening = threading.Lock()
        self._closed = False
        self._held: dict[str, AgentLink] = {}
        """The links of held locks, by token."""
        self._link = self._greeted(open_link())

    @property
    def python(self) -> str:
        """The host's interpreter that has the `launcher` package."""
        return str(self.hello["python"])

    @property
    def state_folder(self) -> str:
        """Where this host keeps its runs if the inventory does not set it."""
        return str(self.hello["state_folder"])

    @property
    def user(self) -> str:
        """The user under which all operations run there."""
        return str(self.hello["user"])

    @property
    def units(self) -> bool:
        """Whether processes can be systemd units there."""
        return bool(self.hello["units"]) and UNITS_MARK in self._link.noise

    @property
    def noise(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the login shell has printed before the agent's first word."""
        return tuple(line for line in self._link.noise if not line.startswith("motley: "))

    @property
    def hello(self) -> Mapping[str, Any]:
        """The agent's hello: also `version`, `wheel` (a digest or None) and `pid`."""
        return self._link.hello

    @property
    def is_spent(self) -> bool:
        """Whether this connection is unusable: closed, or it has lost a lock."""
        return self._closed or any(link.broken is not None for link in self._held.values())

    def ensure(self) -> None:
        """Open a link if the last one is broken.

        Raises:
            UnreachableError: the host does not answer any more.
        """
        self._living()

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return the bytes of a file from `offset` on, at most `limit`; fetched piece by piece."""
        link = self._living()
        most = MOST_READ if limit is None else min(limit, MOST_READ)
        found = bytearray()
        while limit is None or len(found) < limit:
            wanted = frames.PIECE if limit is None else min(frames.PIECE, limit - len(found))
            where = {"path": path, "offset": offset + len(found), "limit": wanted}
            piece = frames.unpack(link.call("read", where, CALL_DEADLINE))
            found += piece[:wanted]
            if len(found) > most or (len(found) == most and limit is None):
                raise OSError(errno.EFBIG, f"longer than {most >> 20} MiB", path)
            if len(piece) < wanted:
                break
        return bytes(found)

    def write(self, path: str, data: bytes) -> None:
        """Replace a file in one step, readable by its owner alone; makes the folders above."""
        link = self._living()
        token = secrets.token_hex(8)
        last = max(0, (len(data) - 1) // frames.PIECE * frames.PIECE)
        for start in range(0, last, frames.PIECE):
            piece = frames.pack(data[start : start + frames.PIECE])
            link.call("append", {"token": token, "data": piece}, CALL_DEADLINE)
        end = {"path": path, "data": frames.pack(data[last:]), "token": token if last else None}
        link.call("write", end, CALL_DEADLINE)

    @contextlib.contextmanager
    def lock(self, path: str, purpose: str) -> Generator[None]:
        """Hold a lock file; the agent frees it when it ends or the launcher falls silent."""
        link, token = self._living(), secrets.token_hex(8)
        try:
            link.call("lock", {"path": path, "purpose": purpose, "token": token}, CALL_DEADLINE)
            self._held[token] = link
            yield
        finally:
            self._held.pop(token, None)
            with contextlib.suppress(UnreachableError):
                link.call("unlock", {"token": token}, _UNLOCK_DEADLINE)

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = CALL_DEADLINE
    ) -> Any:
        """Have an operation done by the agent; JSON in, JSON out."""
        link, given = self._living(), dict(arguments or {})
        try:
            return link.call(name, given, deadline)
        except ValueError as error:
            if f"no operation {name!r}" not in str(error):
                raise
            # An agent of an earlier version keeps questions apart; `versions.py` reports it.
            return link.call("ask", {"name": name, "arguments": given}, deadline)

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """`start`, `stop` or `kill` a unit, by the one sudo rule for it, beside the agent."""
        link = self._living()
        if not self.units:
            raise PreflightError(
                f"host {self.host}: cannot {verb} {unit}: Motley's units or their sudo rule are "
                "missing there; run: ansible-playbook recipes/gpu-training.yml --tags trainer"
            )
        try:
            code, output = link.pipe.run((*UNIT_COMMAND, verb, unit), deadline)
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
        self._link.close()

    def _living(self) -> AgentLink:
        with self._opening:
            for link in self._held.values():
                if link.broken is not None:
                    raise UnreachableError(f"{link.broken}; the lock held there is lost")
            if self._closed:
                raise UnreachableError(f"host {self.host}: the connection was closed")
            if self._link.broken is not None:
                self._link = self._greeted(self._open_link())
            return self._link

    def _greeted(self, link: AgentLink) -> AgentLink:
        schema = link.hello.get("schema")
        wanted = ("python", "user", "units", "state_folder")
        try:
            receive(dict[str, Any], link.hello, "hello")
        except ValueError as error:
            link.close()
            raise UnreachableError(f"host {self.host}: its agent's {error}") from None
        if schema == frames.SCHEMA and all(key in link.hello for key in wanted):
            for key in ("python", "state_folder"):  # used in commands and paths there
                if not _PATH.fullmatch(str(link.hello[key])):
                    link.close()
                    raise UnreachableError(
                        f"host {self.host}: its agent reports an invalid path as its {key}"
                    )
            return link
        link.close()
        raise PreflightError(
            f"host {self.host}: Motley {link.hello.get('version')} there speaks {schema}, "
            f"this one {frames.SCHEMA}; install one version on both: launch cluster push"
        )
