"""A program that imports once and forks a child for each attempt, as its supervisor sees it.

The supervisor passes every program a socket, in $MOTLEY_PARENT as `PID:DESCRIPTOR`. A program that
supports it (`trainer/system/process/prefork.py`) does its imports and then, for each log descriptor
that arrives, forks a child that writes to that log, and replies with its pid. The child is orphaned
on purpose: the supervisor, a subreaper, adopts it, so its exit, signals and group are those of any
child. It waits until the supervisor has recorded its pid. Programs without that support just run.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from launcher.session.child_group import kill_orphans, reap, signal_group, start_child

PARENT_VARIABLE = "MOTLEY_PARENT"
_PATIENCE = 10.0
"""Seconds for a fork; an import is not part of it."""


class Children:
    """The children of a supervisor, one at a time. The supervisor has blocked SIGCHLD and SIGIO.

    One at a time is an attempt's: the program that was started, or what that forked.
    """

    def __init__(self) -> None:
        self._parent: _Parent | None = None
        self._ended: dict[int, int] = {}

    def start(
        self, argv: Sequence[str], folder: str, environment: Mapping[str, str], output: BinaryIO
    ) -> int:
        """Return the pid of a new child: forked where there is a parent for it, else started.

        A forked one waits for `release`.

        Raises:
            OSError: the program cannot be started.
        """
        self.collect()
        if self._parent is not None:
            if (pid := self._parent.fork(output)) is not None:
                return pid
            self.end()
        self._parent = _Parent(argv, folder, environment, output)
        return self._parent.pid

    def forked(self) -> int | None:
        """Return the pid of the attempt's child once the started program proves to be a parent.

        SIGIO says that it is time to look. The child waits for `release`.
        """
        return None if self._parent is None else self._parent.forked()

    def release(self) -> None:
        """Let a forked child continue, if one waits."""
        if self._parent is not None:
            self._parent.release()

    def returncode(self, pid: int) -> int | None:
        """Return how a child has ended, with nothing of it left running; None while it runs."""
        self.collect()
        if pid not in self._ended:
            return None
        returncode = self._ended[pid]
        signal_group(pid, signal.SIGKILL)
        self._note(kill_orphans(spare=None if self._parent is None else self._parent.pid))
        self._ended.clear()
        return returncode

    def collect(self) -> None:
        """Reap what has ended."""
        self._note(reap())

    def end(self) -> None:
        """End what is left."""
        if self._parent is not None:
            self._parent.end()
            self._parent = None
        kill_orphans()

    def _note(self, ended: Mapping[int, int]) -> None:
        self._ended |= ended
        if self._parent is not None and self._parent.pid in ended:
            self._parent.has_ended(ended[self._parent.pid])
            self._parent = None


class _Parent:
    """A started program, which forks children or is the only child itself.

    Args:
        output: where the first child writes, and what goes wrong before.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], folder: str, environment: Mapping[str, str], output: BinaryIO
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                told = {PARENT_VARIABLE: f"{os.getpid()}:{theirs.fileno()}"}
                self._process = start_child(
                    argv, folder, {**environment, **told}, output, keep=theirs.fileno()
                )
        except OSError:
            self._socket.close()
            raise
        self.pid = self._process.pid
        self._holds = False
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._socket, fcntl.F_GETFL)
        fcntl.fcntl(self._socket, fcntl.F_SETFL, flags | os.O_ASYNC)
        self._ask(output)

    def forked(self) -> int | None:
        """Return the pid of a child if one was forked since the last look."""
        return self._answer(0.0)

    def fork(self, output: BinaryIO) -> int | None:
        """Return the pid of one more child; None if the program forks none any more."""
        return self._answer(_PATIENCE) if self._ask(output) else None

    def release(self) -> None:
        """Let a forked child continue, if one waits."""
        if self._holds:
            self._holds = False
            with contextlib.suppress(OSError):  # the program has ended, and its child with it
                self._socket.send(b"go")

    def end(self) -> None:
        """End the program, which is reaped with all others; a child that it forked continues."""
        self._socket.close()
        signal_group(self.pid, signal.SIGKILL)
        self._process.returncode = -signal.SIGKILL

    def has_ended(self, returncode: int) -> None:
        """Let go of the program, which was reaped."""
        self._socket.close()
        self._process.returncode = returncode

    def _ask(self, output: BinaryIO) -> bool:
        try:
            socket.send_fds(self._socket, [b"fork"], [output.fileno()])
        except OSError:  # it is no parent, or it has ended
            return False
        return True

    def _answer(self, patience: float) -> int | None:
        self._socket.settimeout(patience)
        try:
            text = self._socket.recv(64)
        except OSError:
            return None
        self._holds = text.isdigit()
        return int(text) if self._holds else None
