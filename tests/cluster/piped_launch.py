"""`launch` whose hosts are agents behind pipes instead of SSH: `piped_launch HOSTS.json ...`.

HOSTS.json says for each host of the inventory where its state folder is and how it behaves:
{"intel": {"state": "/tmp/intel", "condition": "up"}}; `dead` refuses, `silent` never says a word.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from launcher import cli
from launcher.errors import UnreachableError
from launcher.hosts import ssh
from launcher.hosts.base import Connection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink
from launcher.inventory.hosts import Host
from tests.launcher.agent_pipe import AGENT, ProcessPipe

SILENT = (sys.executable, "-c", "import sys; sys.stdin.read()")


class Hosts:
    """Connections by host name, each opened once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: dict[str, RemoteConnection] = {}
        self._locks: dict[str, threading.Lock] = {}

    def connect(self, host: Host) -> Connection:
        with self._locks.setdefault(host.name, threading.Lock()):
            if host.name not in self._opened:
                self._opened[host.name] = RemoteConnection(host.name, lambda: self._open(host))
            self._opened[host.name].open_link()
            return self._opened[host.name]

    def _open(self, host: Host) -> AgentLink:
        tree = json.loads(self._path.read_text())[host.name]
        if tree["condition"] == "dead":
            raise UnreachableError(f"host {host.name}: connection refused")
        argv = SILENT if tree["condition"] == "silent" else AGENT
        return AgentLink(host.name, ProcessPipe(argv, {"MOTLEY_STATE_DIR": tree["state"]}))


if __name__ == "__main__":
    ssh.connect_host = Hosts(Path(sys.argv[1])).connect
    sys.exit(cli.run(sys.argv[2:]))
