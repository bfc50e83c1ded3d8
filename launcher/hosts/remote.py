"""A host at the other end of a pipe, used like the local one: the client of `agent.py`.

Any byte pipe will do; `ssh.py` makes them of SSH channels. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from launcher.errors import PreflightError, UnreachableError
from launcher.hosts import frames
from launcher.hosts.base import ASK_DEADLINE, UNIT_DEADLINE
from launcher.hosts.rpc import AgentLink
from launcher.supervisor.processes import ProcessIdentity

CALL_DEADLINE = 10.0
"""Seconds that a request may take."""

MOST_READ = 64 << 20
"""Bytes of one file that are read at most: a host must not fill this machine's memory."""

_UNLOCK_DEADLINE = 2.0
_PATH = re.compile(r"/[^\x00-\x1f\x7f-\x9f]{0,4095}")
"""An absolute path; an option begins otherwise."""

UNITS_MARK = "motley: units"
"""Line before the hello: the operator may start and stop the trainer's units."""

UNIT_COMMAND = ("sudo", "-n", "/usr/local/sbin/motley-unit")


class RemoteConnection:
    """A `Connection` to a host that has an agent.

    The next call reopens a broken link. Calls under way when it broke have failed, and a held
    lock is lost: every call within its `with` fails from then on.
    """

    def __init__(self, host: str, open_link: Callable[[], AgentLink]) -> None:
        """Open the first link.

        Raises:
            UnreachableError, PreflightError: as `open_link`, or the agent is of another version.
        """
        self._host = host
        self._open_link = open_link
        self._opening = threading.Lock()
        self._closed = False
        self._held: dict[str, AgentLink] = {}
        """Tokens of the held locks, and their paths."""
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

    def size(self, path: str) -> int:
        """Return the bytes that a file has."""
        size = self._call("size", path=path)
        if not isinstance(size, int):
            raise self._nonsense("size")
        return size

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

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no folder."""
        found = self._list(self._call("names", folder=folder), "names")
        return [name for name in map(str, found) if "/" not in name]

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, for its owner alone; one that exists is left as is."""
        self._call("make_folder", path=path)

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name exists."""
        return bool(self._call("exists", path=path))

    def remove(self, path: str) -> None:
        """Remove a file; no error when there is none."""
        self._call("remove", path=path)

    @contextlib.contextmanager
    def lock(self, path: str, purpose: str) -> Generator[None]:
        """Hold a lock file on the host; its agent frees it when it ends or the launcher is silent.

        Raises:
            PreflightError: another process holds it.
            UnreachableError: from any call within, once the link that holds the lock has broken.
        """
        link, token = self._living(), secrets.token_hex(8)
        try:
            link.call("lock", {"path": path, "purpose": purpose, "token": token}, CALL_DEADLINE)
            self._held[token] = link
            yield
        finally:
            self._held.pop(token, None)
            with contextlib.suppress(UnreachableError):
                link.call("unlock", {"token": token}, _UNLOCK_DEADLINE)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process in a session of its own that outlives this connection."""
        self._call("spawn", argv=list(argv), env=dict(env), log=log)

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether this process runs; a reused pid does not count."""
        return bool(self._call("is_alive", process=asdict(process)))

    def send_signal(self, process: ProcessIdentity, number: int) -> bool:
        """Signal this process; False when it is gone."""
        return bool(self._call("send_signal", process=asdict(process), number=int(number)))

    def send_group_signal(self, leader: ProcessIdentity, number: int) -> bool:
        """Signal the process group of this leader; False when it is gone."""
        return bool(self._call("send_group_signal", leader=asdict(leader), number=int(number)))

    def find_run(self, run_id: str) -> list[ProcessIdentity]:
        """Return every living process of a run, wherever it was reparented to."""
        found = self._list(self._call("find_run", run_id=run_id), "find_run")
        try:
            return [ProcessIdentity(int(p["pid"]), int(p["start"]), str(p["boot"])) for p in found]
        except (KeyError, TypeError, ValueError):
            raise self._nonsense("find_run") from None

    def describe(self, process: ProcessIdentity) -> str:
        """Return the command name and pid for people."""
        return str(self._call("describe", process=asdict(process)))

    def ask(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = ASK_DEADLINE
    ) -> Any:
        """Have a question of `queries.py` answered on that host; JSON in, JSON out."""
        request = {"name": name, "arguments": dict(arguments or {}), "deadline": deadline}
        return self._living().call("ask", request, deadline)

    def control_unit(self, verb: str, unit: str, deadline: float = UNIT_DEADLINE) -> None:
        """`start`, `stop` or `kill` a unit of ours; returns when systemd is done.

        Raises:
            PreflightError: there are no units here, or the host refuses; the message says why.
            UnreachableError: it takes too long, or the host is gone.
        """
        link = self._living()
        if not self.units:
            raise PreflightError(
                f"host {self._host}: cannot {verb} {unit}: no units of ours there, or no sudo rule "
                "for them; run: ansible-playbook recipes/gpu-training.yml --tags trainer"
            )
        try:
            code, output = link.pipe.run((*UNIT_COMMAND, verb, unit), deadline)
        except TimeoutError:
            raise UnreachableError(
                f"host {self._host}: motley-unit {verb} {unit} did not end within {deadline:.0f} s"
            ) from None
        except OSError as error:
            raise UnreachableError(f"host {self._host}: connection lost ({error})") from None
        if code != 0:
            lines = output.strip().splitlines() or [f"exit code {code}"]
            raise PreflightError(f"host {self._host}: motley-unit {verb} {unit}: {lines[-1]}")

    def close(self) -> None:
        """Release the host: locks are freed, started processes continue. Idempotent."""
        self._closed = True
        self._link.close()

    def _call(self, operation: str, **arguments: Any) -> Any:
        return self._living().call(operation, arguments, CALL_DEADLINE)

    def _list(self, answer: Any, operation: str) -> list[Any]:
        if not isinstance(answer, list):
            raise self._nonsense(operation)
        return cast("list[Any]", answer)

    def _nonsense(self, operation: str) -> UnreachableError:
        return UnreachableError(f"host {self._host}: invalid answer of its agent to `{operation}`")

    def _living(self) -> AgentLink:
        with self._opening:
            for link in self._held.values():
                if link.broken is not None:
                    raise UnreachableError(f"{link.broken}; the lock held there is lost")
            if self._closed:
                raise UnreachableError(f"host {self._host}: the connection was closed")
            if self._link.broken is not None:
                self._link = self._greeted(self._open_link())
            return self._link

    def _greeted(self, link: AgentLink) -> AgentLink:
        schema = link.hello.get("schema")
        wanted = ("python", "user", "units", "state_folder")
        if schema == frames.SCHEMA and all(key in link.hello for key in wanted):
            for key in ("python", "state_folder"):  # used in commands and paths there
                if not _PATH.fullmatch(str(link.hello[key])):
                    link.close()
                    raise UnreachableError(
                        f"host {self._host}: its agent names a {key} that is no path of one"
                    )
            return link
        link.close()
        raise PreflightError(
            f"host {self._host}: Motley {link.hello.get('version')} there speaks {schema}, "
            f"this one {frames.SCHEMA}; install one version on both: launch cluster push"
        )
