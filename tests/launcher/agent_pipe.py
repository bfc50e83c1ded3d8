"""An agent as a child process: the pipe that SSH makes, without SSH."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink

AGENT = (sys.executable, "-P", "-m", "launcher.agent")


class ProcessPipe:
    """A `Pipe` to a child process."""

    host_key = ""

    def __init__(self, argv: Sequence[str] = AGENT, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._in, self._out, self._err = (
            self.process.stdin,
            self.process.stdout,
            self.process.stderr,
        )
        os.set_blocking(self._err.fileno(), False)
        self._words = b""
        self._closed = False
        self._reading = threading.Lock()

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._in.write(view) :]

    def receive(self, seconds: float) -> bytes | None:
        with self._reading:
            if self._closed:
                return b""
            if not select.select([self._out], [], [], min(seconds, 0.05))[0]:
                return None
            return os.read(self._out.fileno(), 1 << 16)

    def last_output(self) -> str:
        with self._reading:  # whoever breaks the link and whoever ends it may meet here
            if not self._err.closed:
                self._words += self._err.read() or b""
        return self._words.decode(errors="replace")

    def run_program(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline, check=False)
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.last_output()
            self._in.close()

    def end(self) -> None:
        """Wait for the agent to end because its input has; free what the pipe holds."""
        self.close()
        try:
            self.process.wait(20.0)
        finally:
            self.process.kill()
            self.process.wait()
            with self._reading:
                self._out.close()
                self._err.close()


class AgentHost:
    """A host whose agents are child processes; each link that is opened starts another."""

    def __init__(self, name: str = "far", env: dict[str, str] | None = None) -> None:
        self.name = name
        self.pipes: list[ProcessPipe] = []
        self._env = env

    def open_link(self) -> AgentLink:
        self.pipes.append(ProcessPipe(env=self._env))
        return AgentLink(self.name, self.pipes[-1])

    def connect(self) -> RemoteConnection:
        connection = RemoteConnection(self.name, self.open_link)
        connection.open_link()
        return connection

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.end()


def state_in(folder: Path) -> dict[str, str]:
    """Return the environment of an agent whose state folder is there."""
    return {"MOTLEY_STATE_DIR": str(folder)}
