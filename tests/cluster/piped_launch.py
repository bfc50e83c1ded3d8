"""`launch` whose hosts are agents behind pipes instead of SSH: `piped_launch.py HOSTS.json ...`.

HOSTS.json says for each host of the inventory where its state folder is and how it behaves:
{"intel": {"state": "/tmp/intel", "condition": "up"}}; `dead` refuses, `silent` never says a word.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

from launcher import cli, connection
from launcher.access import Connection
from launcher.agent_link import AgentLink
from launcher.errors import UnreachableError
from launcher.inventory import Host
from launcher.remote import RemoteConnection

SILENT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


class ProcessPipe:
    """The stdin and stdout of an agent that runs as a child."""

    def __init__(self, argv: list[str], state: str) -> None:
        self._child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTLEY_STATE_DIR": state},
            start_new_session=True,  # as over SSH: signals of our terminal do not get there
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._to, self._from = self._child.stdin, self._child.stdout

    def send(self, data: bytes) -> None:
        try:
            self._to.write(data)
            self._to.flush()
        except ValueError as error:
            raise OSError("closed") from error

    def receive(self, seconds: float) -> bytes | None:
        if not select.select([self._from], [], [], seconds)[0]:
            return None
        return os.read(self._from.fileno(), 1 << 16)

    def last_words(self) -> str:
        return ""

    def run(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        raise OSError("no programs here")

    def close(self) -> None:
        self._child.kill()


class Hosts:
    """Connections by host name, each opened once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: dict[str, Connection] = {}
        self._locks: dict[str, threading.Lock] = {}

    def connect(self, host: Host) -> Connection:
        with self._locks.setdefault(host.name, threading.Lock()):
            if host.name not in self._opened:
                self._opened[host.name] = RemoteConnection(host.name, lambda: self._open(host))
            return self._opened[host.name]

    def _open(self, host: Host) -> AgentLink:
        tree = json.loads(self._path.read_text())[host.name]
        if tree["condition"] == "dead":
            raise UnreachableError(f"host {host.name}: connection refused")
        agent = [sys.executable, "-P", "-m", "launcher.agent"]
        argv = SILENT if tree["condition"] == "silent" else agent
        return AgentLink(host.name, ProcessPipe(argv, tree["state"]))


if __name__ == "__main__":
    connection.connect = Hosts(Path(sys.argv[1])).connect
    sys.exit(cli.run(sys.argv[2:]))
