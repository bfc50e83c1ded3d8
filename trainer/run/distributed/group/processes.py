"""The member processes of a replica group: their start, and what the leader does if one is lost.

The leader forks its members before it opens a device or starts a thread, so that they share its
imports. A member dies with its leader (PR_SET_PDEATHSIG). A leader that loses a member ends at
once, with one line on the member: the coordinator loses one worker, and the leader's supervisor
starts the whole group again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

from trainer.run.distributed.group.link import Arrays, GroupLink
from trainer.system.errors import InputError, UnreachableError, first_line
from trainer.system.process.child import die_with_parent
from trainer.system.process.heartbeat import HeartbeatMonitor

HEARTBEAT_INTERVAL = 0.5
"""Seconds between a member's signs of life."""
STALLED = 10.0
"""Seconds without one after which a member counts as lost."""
_CAUSE_WINDOW = 0.5
"""Seconds in which others than the first member to end may turn out to be the cause."""

Body = Callable[[GroupLink, int], int]
"""Main function of a member: takes its link and its rank in the group, returns its exit code."""


@dataclass
class _Member:
    rank: int
    pid: int
    link: GroupLink
    answers: queue.SimpleQueue[dict[str, Any]] = field(
        default_factory=queue.SimpleQueue[dict[str, Any]]
    )
    pending_commands: int = 0
    """Commands that it has not done yet."""
    silence: HeartbeatMonitor = field(default_factory=lambda: HeartbeatMonitor(longest=STALLED / 2))
    """A group that was stopped as a whole goes on."""
    error: dict[str, Any] | None = None
    ended: int | None = None


class Members:
    """The other processes of a group, as its leader, which is rank 0, sees them.

    They end with this process, or at `kill_members`.

    Args:
        devices: of the whole group, by rank.
        body: runs in each member.

    Raises:
        InputError: this system is not Linux.
    """

    def __init__(self, devices: Sequence[str], body: Body) -> None:
        if sys.platform != "linux":
            raise InputError("--strategy: a replica group needs Linux; start a worker per device")
        self.devices = tuple(devices)
        self.world_size = len(devices)
        # A file without a name: a group that is killed leaves none.
        self.store = f"/dev/fd/{os.memfd_create('group')}"
        """A file that all processes of the group have open."""
        self.keep_record: Callable[[], str] = str
        """Keeps the last collectives when a member is lost; returns what to say of them."""
        self._members: list[_Member] = []
        self._closing = False
        for rank in range(1, self.world_size):
            self._members.append(self._fork_member(rank, body))
        atexit.register(_destroy_gloo_group)  # after the next one
        atexit.register(self.kill_members)
        threading.Thread(target=self._watch_members, name="group", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the members, by rank from 1."""
        return [member.pid for member in self._members]

    def send_command(
        self, rank: int, body: Mapping[str, Any], arrays: Arrays | None = None
    ) -> None:
        """Send a member its next command."""
        self._members[rank - 1].pending_commands += 1
        with contextlib.suppress(OSError):  # it has ended, which `_watch_members` reports
            self._members[rank - 1].link.send(body, arrays)

    def send_command_to_all(self, body: Mapping[str, Any]) -> None:
        """Send all members their next command."""
        for member in self._members:
            self.send_command(member.rank, body)

    def collect_answers(self) -> list[dict[str, Any]]:
        """Wait for one answer of every member; return them by rank from 1."""
        return [member.answers.get() for member in self._members]

    def name_rank(self, rank: int) -> str:
        """Return how messages name a process of the group."""
        where = f"{self.devices[rank]} on {socket.gethostname()}"
        return f"rank {rank} of the group of {self.world_size} ({where})"

    def raise_collective_failure(self, error: Exception) -> NoReturn:
        """Raise what made a collective fail, unless the watch ends this process with it first."""
        time.sleep(STALLED + 4 * _CAUSE_WINDOW)
        who = (
            self._name_absent()
            or f"the group's processes on {socket.gethostname()} lost their connections"
        )
        raise UnreachableError(
            f"{who}: {first_line(error)}; the group exits, and its supervisor restarts it"
            + self.keep_record()
        )

    def _name_absent(self) -> str:
        """Return which members are still at it, when others have failed in a collective."""
        absent = [
            m for m in self._members if m.pending_commands and m.error is None and m.ended is None
        ]
        names = ", ".join(self.name_rank(member.rank) for member in absent)
        return names and f"{names} did not take part in a collective operation in time"

    def kill_members(self) -> None:
        """End all members, which then hold no memory of a device any more."""
        if self._closing:
            return
        self._closing = True
        left = [member.pid for member in self._members if member.ended is None]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # `_watch_members` was first
                os.waitpid(pid, 0)

    def _fork_member(self, rank: int, body: Body) -> _Member:
        ours, theirs = Pipe()
        leader = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Member(rank, pid, GroupLink(ours))
        code = 1
        try:
            die_with_parent(leader)
            # The leader is asked to stop together with its process group, and ends them.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            ours.close()
            for other in self._members:
                other.link.close()
            code = body(GroupLink(theirs), rank)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _watch_members(self) -> None:
        """Take the members' answers until one is lost, then end this process."""
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.link, selectors.EVENT_READ, member)
            while not (self._closing or any(map(_is_lost, self._members))):
                self._receive_ready(selector, HEARTBEAT_INTERVAL)
                for member in self._members:
                    member.silence.observe()
            last = time.monotonic()
            while not self._closing and time.monotonic() < last + _CAUSE_WINDOW:
                self._receive_ready(selector, _CAUSE_WINDOW / 5)
        if not self._closing:
            for member in self._members:
                self._collect_exit(member)
        if not self._closing:
            line, code = self._find_cause()
            if code == UnreachableError.exit_code:
                line += self.keep_record()
            self.kill_members()
            sys.stderr.write(f"trainer: {line}\n")
            sys.stderr.flush()
            os._exit(code)  # the main thread may be in a collective that never returns

    def _receive_ready(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Take what members say within so many seconds, or by the first that says something."""
        for key, _ in selector.select(seconds):
            self._receive_from(key.data)
            if key.data.ended is not None:
                selector.unregister(key.fileobj)

    def _receive_from(self, member: _Member) -> None:
        messages = member.link.receive_available()
        member.silence.observe(object())
        if messages is None:
            with contextlib.suppress(ChildProcessError):  # `kill_members` was first
                member.ended = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        for message in messages or ():
            if "error" in message.body:
                member.error = message.body
            elif "done" in message.body:
                member.pending_commands -= 1
            elif "heartbeat" not in message.body:
                member.answers.put(message.body)

    def _collect_exit(self, member: _Member) -> None:
        """Note how a member has ended by now, and what it has said before."""
        if member.ended is None:
            with contextlib.suppress(ChildProcessError):  # `kill_members` was first
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                member.ended = os.waitstatus_to_exitcode(status) if pid else None

    def _find_cause(self) -> tuple[str, int]:
        """Return the line on the member that ended the group, and this process's exit code."""
        again = "the group exits, and its supervisor restarts it"
        lost = UnreachableError.exit_code
        for member in self._members:
            if member.ended is not None and member.ended < 0:
                number = signal.Signals(-member.ended)
                hint = ""
                if number == signal.SIGKILL:
                    hint = (
                        "; if memory ran out (see `dmesg`), lower training.micro_batch_size or "
                        "data.max_seq_len"
                    )
                line = f"{self.name_rank(member.rank)} was killed by {number.name}: {again}{hint}"
                return line, lost
        for member in self._members:
            if member.error is not None and not member.error["collective"]:
                line = f"{self.name_rank(member.rank)}: {member.error['error']}"
                return line, int(member.error["code"])
        for member in self._members:
            if member.silence.seconds > STALLED:
                line = (
                    f"{self.name_rank(member.rank)} has not answered for {STALLED:.0f} s (it is "
                    f"stopped, or its machine is overloaded): {again}"
                )
                return line, lost
        for member in self._members:
            if member.error is not None:
                who = self._name_absent() or self.name_rank(member.rank)
                return f"{who}: {member.error['error']}: {again}", lost
        member = next(member for member in self._members if member.ended is not None)
        return f"{self.name_rank(member.rank)} exited with code {member.ended}: {again}", lost


def _is_lost(member: _Member) -> bool:
    return member.ended is not None or member.error is not None or member.silence.seconds > STALLED


def _destroy_gloo_group() -> None:
    """End gloo's threads, which must not outlive the interpreter; NCCL may wait for members."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()
