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
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from trainer.system.process.child import (
    PARENT_VARIABLE,
    kill_orphans,
    reap_children,
    signal_group,
    start_child,
)

_PATIENCE = 10.0
"""Seconds for a fork; an import is not part of it."""


class Children:
    """The children of a supervisor, which has blocked SIGCHLD: one at a time.

    One is an attempt's: the program that was started, or what that forked.
    """

    def __init__(self) -> None:
        self._program: int | None = None
        """The pid of the started program."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """To the program; without one its calls raise OSError."""
        self._holds = False
        """Whether a forked child waits for `release_child`."""
        self._ended: dict[int, int] = {}

    def start(
        self, argv: Sequence[str], folder: str, environment: Mapping[str, str], output: BinaryIO
    ) -> int:
        """Return the pid of a new child: forked by the program if it can, else started.

        A forked one waits for `release_child`.

        Raises:
            OSError: the program cannot be started.
        """
        self.reap_children()
        if self._request_child(output) and (pid := self._receive_pid(_PATIENCE)) is not None:
            return pid
        self.end()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            variables = {PARENT_VARIABLE: f"{os.getpid()}:{theirs.fileno()}"}
            environment = {**environment, **variables}
            process = start_child(argv, folder, environment, output, keep=theirs.fileno())
        process.returncode = 0  # it is reaped with all others
        self._program = process.pid
        self._request_child(output)
        return process.pid

    def find_forked_child(self) -> int | None:
        """Return the pid of the attempt's child once the started program has forked it.

        SIGCHLD says that it is time to look. The child waits for `release_child`.
        """
        return self._receive_pid(0.0)

    def release_child(self) -> None:
        """Let a forked child continue, if one waits."""
        if self._holds:
            self._holds = False
            with contextlib.suppress(OSError):  # the program has ended, and its child with it
                self._socket.send(b"go")

    def poll_child(self, pid: int) -> int | None:
        """Return how a child has ended, with nothing of it left running; None while it runs."""
        self.reap_children()
        if pid not in self._ended:
            return None
        returncode = self._ended[pid]
        signal_group(pid, signal.SIGKILL)
        self._note_ended(kill_orphans(spare=self._program))
        self._ended.clear()
        return returncode

    def reap_children(self) -> None:
        """Reap what has ended."""
        self._note_ended(reap_children())

    def end(self) -> None:
        """End what is left; a child that was forked is an orphan like others."""
        if self._program is not None:
            signal_group(self._program, signal.SIGKILL)
        self._release_program()
        kill_orphans()

    def _note_ended(self, ended: Mapping[int, int]) -> None:
        self._ended |= ended
        if self._program in ended:
            self._release_program()

    def _release_program(self) -> None:
        self._program = None
        self._socket.close()

    def _request_child(self, output: BinaryIO) -> bool:
        """Ask the program for a child; False if it forks none, or has ended."""
        try:
            socket.send_fds(self._socket, [b"fork"], [output.fileno()])
        except OSError:
            return False
        return True

    def _receive_pid(self, patience: float) -> int | None:
        """Return the pid of a child if the program has forked one."""
        try:
            self._socket.settimeout(patience)
            text = self._socket.recv(64)
        except OSError:
            return None
        self._holds = text.isdigit()
        return int(text) if self._holds else None
