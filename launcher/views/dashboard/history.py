"""The history of a run, read from its `metrics.jsonl` as it grows.

A cursor is the offset behind a line of that file, so it holds for every dashboard of the run and
survives its restart. What the page needs of a line is kept, as JSON; the rest is dropped.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from launcher.hosts import ssh
from launcher.runs.processes.log_pages import line_pages
from launcher.runs.records.run import Run
from trainer.system.received import parse, plain

METRICS_FILE = "metrics.jsonl"
_MOST_RANKS = 4096

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Word = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=400)]
_Ranks = Annotated[list[_Count], Field(max_length=_MOST_RANKS)]
_Shard = Annotated[list[_Count], Field(min_length=3, max_length=3)]
_ByRank = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,6}$")], float], Field(max_length=4096)
]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    step: _Count
    time: float


class _StepLine(_Line):
    """A step: its figures, and what its ledger says of the samples that counted."""

    kind: Literal["step"]
    epoch: _Count = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    exchange_ms: float | None = None
    exchange_exposed_ms: float | None = None
    exchange_bytes: float | None = None
    ce: float | None = None
    kl: float | None = None
    shares: _ByRank = {}
    worker_tokens_per_second: _ByRank = {}
    worker_seconds: _ByRank | None = None
    worker_overlap_seconds: _ByRank | None = None
    samples: Annotated[list[_Shard], Field(max_length=1 << 17)] = []


class _ValidationLine(_Line):
    kind: Literal["validation"]
    loss: float | None = None
    accuracy: float | None = None


class _EventLine(_Line):
    kind: Literal["event"]
    event: _Word
    rank: _Count | None = None
    host: _Text | None = None
    device: _Text | None = None
    reason: _Text | None = None
    path: _Text | None = None
    digest: _Word | None = None
    ranks: _Ranks | None = None
    samples: _Count | None = None
    to: _Ranks | None = None


_LINE: TypeAdapter[_StepLine | _ValidationLine | _EventLine] = TypeAdapter(
    Annotated[_StepLine | _ValidationLine | _EventLine, Field(discriminator="kind")]
)


class History:
    """Lines of one run's metrics, by the offset behind each."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path: str | None = None
        self._offset = 0
        self._ends: list[int] = []
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def read_on(self) -> None:
        """Take what was written since; a file that became shorter is read from its beginning.

        Raises:
            LauncherError, OSError: the leader's host or its file cannot be read now.
        """
        connection = ssh.connect(self._run.head)
        if self._path is None:
            plan = self._run.plan_by(self._run.head, connection)
            if plan is None:
                return
            self._path = f"{plan.output}/{METRICS_FILE}"
        path = self._path
        with self._lock:
            if connection.size(path) < self._offset:
                self._offset, self._ends, self._lines = 0, [], []

            def read(offset: int, limit: int) -> bytes:
                return connection.read(path, offset, limit)

            for page in line_pages(read, self._offset, whole=False):
                end = self._offset
                for line in page.lines:
                    end += len(line) + 1
                    if (kept := compact(line)) is not None:
                        self._ends.append(end)
                        self._lines.append(kept)
                self._offset = page.end

    def after(self, cursor: int) -> tuple[int, str] | None:
        """Return the cursor behind the last line, and the lines after a cursor as a JSON array.

        None: the cursor is of a file that is gone, and its reader begins again at 0.
        """
        with self._lock:
            if cursor > self._offset:
                return None
            lines = self._lines[bisect_right(self._ends, cursor) :]
            return self._offset, f"[{','.join(lines)}]"


def compact(line: bytes) -> str | None:
    """Return what the page shows of a line, as JSON; None for one that it does not."""
    try:
        tree: Any = parse(line, METRICS_FILE)
        record = _LINE.validate_python(plain(tree) if isinstance(tree, dict) else tree)  # pyright: ignore[reportUnknownArgumentType] - JSON
    except (ValueError, RecursionError):
        return None
    kept = record.model_dump(exclude_none=True)
    if isinstance(record, _StepLine):
        kept["counted"] = counted(record.samples)
        del kept["samples"]
    return json.dumps(kept, separators=(",", ":"))


def counted(samples: Sequence[Sequence[int]]) -> list[int]:
    """Return of a step's ledger: first sample, behind the last, missing ones, repeated ones.

    `samples` are [rank, start, stop] in the epoch's order; all counted exactly once if the last
    two figures are 0.
    """
    parts = sorted((start, stop) for _, start, stop in samples if stop > start)
    if not parts:
        return [0, 0, 0, 0]
    missing = repeated = 0
    reached = parts[0][1]
    for (_, _), (start, stop) in pairwise(parts):
        missing += max(0, start - reached)
        repeated += max(0, min(stop, reached) - start)
        reached = max(reached, stop)
    return [parts[0][0], reached, missing, repeated]
