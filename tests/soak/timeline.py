"""What a run did and when, by the clock of the soak: its own clocks jump."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.session.processes import ProcessIdentity

_LOOK = 0.02
_SAMPLE = 5.0


@dataclass(frozen=True)
class Membership:
    """A worker came or went; without a rank, a coordinator began and has no members yet."""

    at: float
    event: str
    rank: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a process held at one time."""

    at: float
    memory: int
    """Bytes in memory."""
    descriptors: int
    threads: int


@dataclass
class Timeline:
    """Times are seconds after the start of the soak."""

    commits: list[float] = field(default_factory=list[float])
    """When each committed step was seen, those included that a restart made void."""
    members: list[Membership] = field(default_factory=list[Membership])
    usage: dict[tuple[str, int], list[Usage]] = field(
        default_factory=lambda: defaultdict[tuple[str, int], list[Usage]](list)
    )
    """By name and pid."""

    def take(self, record: dict[str, Any], at: float) -> None:
        """Note a line of metrics.jsonl."""
        if record.get("kind") == "step":
            self.commits.append(at)
        elif record.get("event") in ("joined", "rejoined", "lost"):
            self.members.append(Membership(at, record["event"], record["rank"]))
        elif record.get("event") == "listening":
            self.members.append(Membership(at, "listening"))

    @property
    def present(self) -> set[int]:
        """The ranks that are members now."""
        present: set[int] = set()
        for change in list(self.members):
            apply(present, change)
        return present


def apply(present: set[int], change: Membership) -> None:
    """Change a set of ranks as a membership event says."""
    if change.rank is None:
        present.clear()
    elif change.event == "lost":
        present.discard(change.rank)
    else:
        present.add(change.rank)


class Recorder:
    """Follows metrics.jsonl and the processes in a thread of its own."""

    def __init__(self, metrics: Path, processes: Callable[[], dict[str, ProcessIdentity]]) -> None:
        self.timeline = Timeline()
        self._metrics = metrics
        self._processes = processes
        self._began = time.monotonic()
        self._offset = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="recorder")

    @property
    def now(self) -> float:
        """Seconds after the start."""
        return time.monotonic() - self._began

    @property
    def silence(self) -> float:
        """Seconds since the last committed step."""
        commits = self.timeline.commits
        return self.now - (commits[-1] if commits else 0.0)

    def start(self) -> None:
        """Begin: what is in the file already happened before the start."""
        self._began = time.monotonic()
        self._read(before=True)
        self._thread.start()

    def stop(self) -> None:
        """Take what came last."""
        self._over.set()
        self._thread.join()
        self._read()

    def _follow(self) -> None:
        due = 0.0
        while not self._over.wait(_LOOK):
            self._read()
            if self.now >= due:
                due = self.now + _SAMPLE
                self._sample()

    def _read(self, before: bool = False) -> None:
        with self._metrics.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        at = 0.0 if before else self.now
        for line in whole.splitlines():
            with suppress(ValueError):  # half a line that a killed coordinator left
                record = json.loads(line)
                if not (before and record.get("kind") == "step"):
                    self.timeline.take(record, at)

    def _sample(self) -> None:
        for name, process in self._processes().items():
            with suppress(OSError, ValueError, KeyError):  # it has ended, or is about to
                folder = Path("/proc", str(process.pid))
                fields = dict(
                    line.split(":", 1) for line in (folder / "status").read_text().splitlines()
                )
                usage = Usage(
                    self.now,
                    int(fields["VmRSS"].split()[0]) * 1024,
                    len(list((folder / "fd").iterdir())),
                    int(fields["Threads"]),
                )
                self.timeline.usage[name, process.pid].append(usage)
