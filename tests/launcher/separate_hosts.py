"""Hosts with agents of their own, each in a network namespace of its own. Needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.rig.network import ShapedNetwork, missing
from launcher.errors import UnreachableError
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink
from launcher.hosts.survey import Survey, survey_connections
from launcher.inventory.hosts import Host
from tests.launcher.agent_pipe import AGENT, ProcessPipe, state_in

__all__ = ["SeparateHosts", "missing"]


class SeparateHosts:
    """Some hosts on a switch, reached through the pipes of their agents."""

    def __init__(self, folder: Path, *names: str, rate: int = 10**9) -> None:
        self._folder = folder
        self._names = names
        self._network = ShapedNetwork(len(names), rate)
        self._stack = ExitStack()
        self._lost: set[str] = set()
        self.connections: dict[str, RemoteConnection] = {}
        self.pipes: dict[str, ProcessPipe] = {}

    def __enter__(self) -> Self:
        self._stack.enter_context(self._network)
        for name in self._names:
            self.connections[name] = RemoteConnection(name, lambda name=name: self._open(name))
            self.connections[name].open_link()
            self._stack.callback(self.connections[name].close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def address(self, name: str) -> str:
        return self._network.address(self._names.index(name))

    def run(self, name: str, command: str) -> None:
        """Run a command on a host."""
        inside = self._network.inside(self._names.index(name))
        subprocess.run([*inside, *command.split()], check=True, capture_output=True, text=True)

    @contextmanager
    def running(self, name: str, argv: list[str]) -> Generator[str]:
        """Run a program on a host meanwhile; gives its first line."""
        inside = self._network.inside(self._names.index(name))
        with subprocess.Popen([*inside, *argv], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline()
            finally:
                process.kill()

    def lose(self, name: str) -> None:
        """Kill the agent of a host, and every one that would follow it."""
        self._lost.add(name)
        self.pipes[name].process.kill()
        self.pipes[name].process.wait()

    def survey(self, *hosts: Host) -> Survey:
        return survey_connections(hosts, self.connections)

    def _open(self, name: str) -> AgentLink:
        if name in self._lost:
            raise UnreachableError(f"host {name}: no route to host")
        inside = self._network.inside(self._names.index(name))
        pipe = ProcessPipe((*inside, *AGENT), state_in(self._folder / name))
        self._stack.callback(pipe.end)
        self.pipes[name] = pipe
        return AgentLink(name, pipe)
