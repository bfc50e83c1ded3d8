"""Heartbeats distinguish a slow teacher from one that is done or dead.

A teacher replaces a small file every few seconds, also during a long forward. Readers look only at
changes, timed by their own clock: the clocks of two hosts need not agree.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from trainer.distill.logits.shard_folder import ShardFolder
from trainer.system.process.heartbeat import HeartbeatMonitor, start_heartbeat
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import replace_file
from trainer.system.storage.jsonl import Outage, json_text
from trainer.system.untrusted_data import validate_json

logger = logging.getLogger(__name__)

State = Literal["running", "waiting", "done", "failed"]
INTERVAL = 2.0
"""Seconds between two beats."""


@dataclass(frozen=True, kw_only=True)
class TeacherState:
    """The state that a teacher reports."""

    name: str
    state: State = "running"
    reason: str | None = None
    """Why it failed."""
    shards_done: int = 0
    shards: int = 0
    """The number of this teacher's shards."""
    tokens_per_second: float | None = None
    """The last rate that was measured there, maybe by an earlier process: a plan is made of it."""
    device: str | None = None
    """Its device as torch names it; None if no model was ever loaded."""


class TeacherHeartbeat:
    """Writes a teacher's heartbeat in a separate thread, until `done` or `failed`.

    A failed write is logged as an alarm and does not stop the teacher. As a context manager it
    reports `failed` if an exception leaves the block.
    """

    def __init__(
        self, folder: ShardFolder[Any, Any], name: str, interval: float = INTERVAL
    ) -> None:
        assert Path(name).name == name
        self._path = folder.teachers / f"{name}.json"
        self._state = TeacherState(name=name)
        with suppress(OSError, ValueError):  # none before, or nothing to be read
            before = _parse_state(read_file(self._path))
            measured = {"tokens_per_second": before.tokens_per_second, "device": before.device}
            self._state = replace(self._state, **measured)
        self._counter = 0
        self._outage = Outage(self._path, logger.warning)
        self._lock = threading.Lock()
        self._write_periodically()
        self._ended = start_heartbeat(self._write_periodically, interval)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._ended.is_set() and kind is not None:
            self.report_failure(str(error) or kind.__name__)
        self._ended.set()

    def report_progress(
        self,
        *,
        shards_done: int,
        shards: int,
        tokens_per_second: float | None = None,
        device: str | None = None,
        state: Literal["running", "waiting"] = "running",
    ) -> None:
        """Report the teacher's progress; `waiting` is for requests, after its pass.

        Without a rate the last one on this device stays, without a device that one.
        """
        last = self._state
        if tokens_per_second is None and device in (None, last.device):
            tokens_per_second = last.tokens_per_second
        self._state = replace(
            last,
            state=state,
            shards_done=shards_done,
            shards=shards,
            tokens_per_second=tokens_per_second,
            device=device or last.device,
        )
        self._write_periodically()

    def report_done(self) -> None:
        """Report that this teacher is done, and end."""
        self._write_last(replace(self._state, state="done"))

    def report_failure(self, reason: str) -> None:
        """Report why this teacher failed, and end."""
        self._write_last(replace(self._state, state="failed", reason=reason))

    def _write_last(self, last: TeacherState) -> None:
        self._ended.set()
        self._state = last
        self._write_periodically()

    def _write_periodically(self) -> None:
        with self._lock:
            self._counter += 1
            writer = {"host": socket.gethostname(), "pid": os.getpid(), "counter": self._counter}
            try:
                replace_file(self._path, json_text(vars(self._state) | writer) + "\n")
                self._outage.note_success()
            except OSError as error:
                self._outage.note_failure(error.strerror or str(error))


@dataclass(frozen=True, kw_only=True)
class TeacherStatus:
    """A teacher as a reader sees it."""

    state: TeacherState
    silent: float
    """Seconds since its file changed, or since it was first seen."""


class TeacherWatch:
    """Follows the heartbeats of a folder, on this machine's monotonic clock."""

    def __init__(
        self, folder: ShardFolder[Any, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder.teachers
        self._start = HeartbeatMonitor(clock)
        self._seen: dict[str, tuple[bytes, TeacherState]] = {}
        self._silences = defaultdict[str, HeartbeatMonitor](lambda: HeartbeatMonitor(clock))

    def list_teachers(self) -> list[TeacherStatus]:
        """Return every teacher that ever wrote to the folder, by name."""
        try:
            paths = list(self._folder.glob("*.json"))
        except OSError:  # an unreachable share
            paths = []
        for path in paths:
            with suppress(OSError, ValueError):  # an unreadable file counts as unchanged
                content = read_file(path)
                self._seen[path.name] = content, _parse_state(content)
        return [
            TeacherStatus(state=state, silent=self._silences[name].observe(content))
            for name, (content, state) in sorted(self._seen.items())
        ]

    def seconds_of_silence(self) -> float:
        """Return the seconds without a sign of a living teacher, counted from the first look."""
        silences = [
            status.silent
            for status in self.list_teachers()
            if status.state.state in ("running", "waiting")
        ]
        return min([self._start.observe(), *silences])

    def describe_lost(self) -> str:
        """Return what is known of the teachers that are not done, in one line; empty: nothing."""
        return "; ".join(
            f"{each.state.name} {each.state.reason or each.state.state}"
            + (f", silent for {each.silent:.0f} s" if each.state.state != "failed" else "")
            for each in self.list_teachers()
            if each.state.state != "done"
        )


def _parse_state(content: bytes) -> TeacherState:
    return validate_json(TeacherState, content, "heartbeat", lines=True, least=0)
