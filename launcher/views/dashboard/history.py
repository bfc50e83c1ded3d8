"""The history of a run, read from its `metrics.jsonl` as it grows.

A cursor is the offset behind a line of that file, so it holds for every dashboard of the run and
survives its restart. What the page needs of a line is kept, as JSON; the rest is dropped. Of a
very long run the older half keeps of every 8 steps, later of every 16, and so on, those with the
least and the greatest loss and speed, so that no spike vanishes: what a step tells of all before
it (`totals`), and a proof (`proofs`), are sums, which no dropped line changes. Validations are
thinned out in the same way, and of checkpoints and answers the last of each group is kept.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from launcher.hosts import ssh
from launcher.runs.processes.log_pages import LogPage, line_pages
from launcher.runs.records.run import Run
from trainer.config.run import MOST_CLASSES
from trainer.data.metrics import Figure, Figures
from trainer.system.untrusted_data import drop_odd_values, parse_json

METRICS_FILE = "metrics.jsonl"
MOST = 16 << 20
"""Characters that the page's server keeps of a run, and a page loads: about 30,000 steps of three
workers, of which a screen is a few thousand pixels wide."""
_STEP, _PROOF, _VALIDATION, _CHECKPOINT, _ANSWER = range(1, 6)
"""Kinds of lines that are thinned out, each by itself; beyond the last one answers by prompt."""
_MOST_RANKS = 4096
_MOST_BACK = 20_000
"""Steps behind the last one to which a resumed run can return without losing the sums."""

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Word = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=400)]
_ShortText = Annotated[str, AfterValidator(lambda text: text[:400])]
_Ranks = Annotated[list[_Count], Field(max_length=_MOST_RANKS)]
_Shard = Annotated[list[_Count], Field(min_length=3, max_length=3)]
_Confusion = Annotated[
    list[Annotated[list[_Count], Field(max_length=MOST_CLASSES)]], Field(max_length=MOST_CLASSES)
]
_ByRank = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,6}$")], Figure], Field(max_length=4096)
]


# Dataclasses with slots: a model of pydantic takes half as long again, of a million lines.
@dataclass(slots=True, kw_only=True)
class _Line:
    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    step: _Count
    time: Figure


@dataclass(slots=True, kw_only=True)
class _StepLine(_Line):
    """A step: its figures, and what its ledger says of the samples that counted."""

    kind: Literal["step"]
    epoch: _Count = 0
    loss: Figure | None = None
    learning_rate: Figure | None = None
    tokens_per_second: Figure | None = None
    seconds: Figure | None = None
    exchange_ms: Figure | None = None
    exchange_exposed_ms: Figure | None = None
    exchange_bytes: _Count = 0
    ce: Figure | None = None
    kl: Figure | None = None
    worker_samples: _ByRank = field(default_factory=dict[str, float])
    worker_seconds: _ByRank | None = None
    worker_overlap_seconds: _ByRank | None = None
    sample_ranges: Annotated[list[_Shard], Field(max_length=1 << 17)] = field(
        default_factory=list[list[int]]
    )


@dataclass(slots=True, kw_only=True)
class _ValidationLine(_Line):
    kind: Literal["validation"]
    loss: Figure | None = None
    accuracy: Figure | None = None
    mcc: Figure | None = None
    reward_chosen: Figure | None = None
    reward_rejected: Figure | None = None
    reward_margin: Figure | None = None
    reward_accuracy: Figure | None = None
    figures: Figures | None = None
    confusion: _Confusion | None = None


@dataclass(slots=True, kw_only=True)
class _AnswerLine(_Line):
    kind: Literal["answer"]
    number: _Count
    prompt: _ShortText
    text: _ShortText


@dataclass(slots=True, kw_only=True)
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


_Sums = tuple[int, int, int, int, int]
_Known = _StepLine | _ValidationLine | _AnswerLine | _EventLine
_LINE: TypeAdapter[_Known] = TypeAdapter(Annotated[_Known, Field(discriminator="kind")])
_read_line = _LINE.validator.validate_json
_Added = tuple[()] | tuple[int] | tuple[list[int], _Sums]
"""Values added to a line: none, the number of proofs, or a step's ledger and the running sums."""


class _Lines:
    """Lines that were read, and in columns what decides whether each is kept.

    Columns of numbers: with an object for each line a third of the time is garbage collection.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ends, self.steps, self.kinds = array("Q"), array("Q"), array("Q")
        """Lines of a kind are thinned out together; 0: never."""
        self.figures = array("d"), array("d")
        """The figures whose extremes are kept; NaN where there is none."""

    def append(
        self, text: str, end: int, step: int, kind: int, figures: tuple[float, float]
    ) -> None:
        """Add a line."""
        self.texts.append(text)
        self.ends.append(end)
        self.steps.append(step)
        self.kinds.append(kind)
        self.figures[0].append(figures[0])
        self.figures[1].append(figures[1])

    def extend(self, more: _Lines) -> None:
        """Add lines."""
        self.texts += more.texts
        self.ends += more.ends
        self.steps += more.steps
        self.kinds += more.kinds
        for column, figures in zip(self.figures, more.figures, strict=True):
            column += figures

    def select(self, keep: bytearray) -> None:
        """Drop the lines that are not kept."""
        self.texts = list(compress(self.texts, keep))
        self.ends = array("Q", compress(self.ends, keep))
        self.steps = array("Q", compress(self.steps, keep))
        self.kinds = array("Q", compress(self.kinds, keep))
        first, second = self.figures
        self.figures = array("d", compress(first, keep)), array("d", compress(second, keep))

    def choose_kept(self, every: int, count: int) -> bytearray:
        """Return for each of the first lines whether it is kept, of groups of so many steps."""
        kinds = self.kinds[:count]
        keep = bytearray(not kind for kind in kinds)
        groups = [step // every for step in self.steps[:count]]
        of_kind: dict[int, list[int]] = {}
        for at, kind in enumerate(kinds):
            if kind:
                of_kind.setdefault(kind, []).append(at)
        for kind, places in of_kind.items():
            for _, group in groupby(places, groups.__getitem__):
                lines = list(group)
                kept = set[int]() if kind == _STEP else {lines[-1]}
                if kind in (_STEP, _VALIDATION):
                    kept.update(_select_extremes(lines, self.figures))
                for at in kept:
                    keep[at] = 1
        return keep


class History:
    """Lines of one run's metrics, by the offset behind each.

    Args:
        most: characters of lines that are kept; beyond them the older half is thinned out.
    """

    def __init__(self, run: Run, most: int = MOST) -> None:
        self.run = run
        self._most = most
        self._path: str | None = None
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._lines = _Lines()
        self._every = 1
        """Steps of the older half of which the extremes are kept."""
        self._size = 0
        self._proofs = 0
        self.confusion: tuple[int, list[list[int]]] | None = None
        """The step of the last validation with a confusion matrix, and the matrix."""
        self._totals = RunningTotals()
        self._begun = set[int]()
        """Kinds of which there was a line: the first is never dropped."""
        self._keep_next = True
        """Whether the next step is never dropped: the first, or one behind a loss."""

    def read_on(self) -> None:
        """Take what was written since; a file that became shorter is read from its beginning.

        Raises:
            LauncherError, OSError: the leader's host or its file cannot be read now.
        """
        connection = ssh.connect_host(self.run.leader_host)
        if self._path is None:
            plan = self.run.read_plan_of_host(self.run.leader_host, connection)
            if plan is None:
                return
            self._path = f"{plan.output}/{METRICS_FILE}"
        path = self._path
        with self._lock:
            if (size := connection.file_size(path)) < self._offset:
                self._reset()

            def read_metrics(offset: int, limit: int) -> bytes:
                return connection.read(path, offset, limit)

            for page in line_pages(read_metrics, self._offset, whole=False):
                self._append_page(page, is_far=size - page.end > 2 * self._most, size=size)
                self._offset = page.end
                while self._size > self._most and self._thin_out():
                    pass

    def select_lines_after(self, cursor: int) -> tuple[int, str] | None:
        """Return the cursor behind the last line, and the lines after a cursor as a JSON array.

        None: the cursor is of a file that is gone, and its reader begins again at 0.
        """
        with self._lock:
            if cursor > self._offset:
                return None
            lines = self._lines.texts[bisect_right(self._lines.ends, cursor) :]
            return self._offset, f"[{','.join(lines)}]"

    @property
    def position(self) -> tuple[int, int]:
        """The epoch of the last step, and the sample behind it in the epoch's order."""
        return self._totals.place or (0, 0)

    def _count_record(self, record: _Known) -> tuple[int, _Added]:
        """Add a line to the sums, and return its kind and what it tells of them."""
        added: _Added = ()
        kind = 0
        if isinstance(record, _StepLine):
            ledger = count_samples(record.sample_ranges)
            added = ledger, self._totals.add_step(record, ledger)
            kind, self._keep_next = 0 if self._keep_next else _STEP, False
        elif isinstance(record, _ValidationLine):
            kind = _VALIDATION
            if record.confusion:
                self.confusion = record.step, record.confusion
        elif isinstance(record, _AnswerLine):
            kind = _ANSWER + record.number
        elif record.event == "verified":
            self._proofs += 1
            added, kind = (self._proofs,), _PROOF
        elif record.event == "checkpoint":
            kind = _CHECKPOINT
        elif record.event in ("lost", "resumed"):
            self._keep_next = True  # it tells how long this held up the run
            if record.event == "resumed":
                self._totals.return_to(record.step)
                if self.confusion and self.confusion[0] > record.step:
                    self.confusion = None
        if kind > _PROOF and kind not in self._begun:
            self._begun.add(kind)
            kind = 0
        return kind, added

    def _append_page(self, page: LogPage, *, is_far: bool, size: int) -> None:
        """Keep lines; of those far from the file's end, what thinning out would leave of them."""
        read, far = _Lines(), list[tuple[bytes, _Added]]()
        end = self._offset
        for line in page.lines:
            end += len(line) + 1
            if (record := parse_record(line)) is None:
                continue
            kind, sums = self._count_record(record)
            if is_far:  # few are kept: the bytes are one object, the record is a dozen
                far.append((line, sums))
            text = "" if is_far else _format_record(record, sums)
            read.append(text, end, record.step, kind, _get_extreme_figures(record))
        if is_far:
            self._every = max(self._every, 1 << (4 * size // self._most).bit_length() - 1)
            keep = read.choose_kept(self._every, len(far))
            read.select(keep)
            kept = ((parse_record(line), sums) for line, sums in compress(far, keep))
            read.texts = [_format_record(record, sums) for record, sums in kept if record]
        self._lines.extend(read)
        self._size += sum(map(len, read.texts))

    def _thin_out(self) -> bool:
        """Drop at least every second line of the older half that may be; return if any may be."""
        lines = self._lines
        half = len(lines.texts) // 2
        furthest = max(compress(lines.steps[:half], lines.kinds), default=0)
        keep = lines.choose_kept(self._every, half)
        while sum(keep) > half // 2 and self._every <= furthest:
            self._every *= 2
            keep = lines.choose_kept(self._every, half)
        dropped = sum(keep) < half
        lines.select(keep + b"\1" * (len(lines.texts) - half))
        self._size = sum(map(len, lines.texts))
        return dropped


def _select_extremes(lines: list[int], figures: Sequence[Sequence[float]]) -> Iterable[int]:
    """Return of some lines those with the least and the greatest of each figure."""
    if len(lines) <= 2 * len(figures):
        return lines
    found: set[int] = set()
    for each in figures:
        if known := [at for at in lines if not math.isnan(each[at])]:
            found |= {min(known, key=each.__getitem__), max(known, key=each.__getitem__)}
    return found or lines[:1]


class RunningTotals:
    """Sums over the steps that count: samples, missing and repeated ones, tokens, and bytes.

    A resumed run goes on with the sums of the step from which it does.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        """The epoch of the last step, and the sample behind it in the epoch's order."""
        self._sums: _Sums = (0, 0, 0, 0, 0)
        self._last = deque[tuple[int, tuple[int, int], _Sums]](maxlen=_MOST_BACK)
        """The last steps, each with its position in the data and the running sums."""

    def add_step(self, step: _StepLine, ledger: Sequence[int]) -> _Sums:
        """Count a step, of which the ledger was `counted`, and return the sums."""
        first, behind, missing, repeated = ledger
        added = behind - first - missing
        if self.place is not None and self.place[0] == step.epoch:
            if first > self.place[1]:
                missing += first - self.place[1]
            else:
                repeated += self.place[1] - first
        tokens = round((step.tokens_per_second or 0.0) * (step.seconds or 0.0))
        before = self._sums
        self.place = (step.epoch, behind)
        self._sums = (
            before[0] + added,
            before[1] + missing,
            before[2] + repeated,
            before[3] + tokens,
            before[4] + step.exchange_bytes,
        )
        self._last.append((step.step, self.place, self._sums))
        return self._sums

    def return_to(self, step: int) -> None:
        """Forget the steps behind one; of one that is too long ago nothing is known."""
        for number, place, sums in reversed(self._last):
            if number == step:
                self.place, self._sums = place, sums
                return
        self.place, self._sums = None, self._sums if step else (0, 0, 0, 0, 0)


def parse_record(line: bytes) -> _Known | None:
    """Return what the page shows of a line; None for one that it does not."""
    try:
        return _read_line(line)  # nearly all lines, in a fraction of the time
    except ValueError:
        pass
    try:
        tree: Any = parse_json(line, METRICS_FILE)
        return _read_line(json.dumps(drop_odd_values(tree))) if isinstance(tree, dict) else None  # pyright: ignore[reportUnknownArgumentType] - JSON
    except (ValueError, RecursionError):
        return None


def _format_record(record: _Known, added: _Added) -> str:
    """Return a line as JSON, without what the page does not show."""
    unsent = {"sample_ranges", "exchange_bytes"} if isinstance(record, _StepLine) else {"confusion"}
    text = _LINE.dump_json(record, exclude_none=True, exclude=unsent).decode()
    if not added:
        return text
    names = ("ledger", "totals") if isinstance(record, _StepLine) else ("proofs",)
    more = json.dumps(dict(zip(names, added, strict=True)), separators=(",", ":"))
    return f"{text[:-1]},{more[1:]}"


def _get_extreme_figures(record: _Known) -> tuple[float, float]:
    """Return the figures of a line whose extremes are kept; NaN where there is none."""
    if isinstance(record, _StepLine):
        first, second = record.loss, record.tokens_per_second
    elif isinstance(record, _ValidationLine):
        first, second = record.loss, record.accuracy
    else:
        first = second = None
    return math.nan if first is None else first, math.nan if second is None else second


def count_samples(samples: Sequence[Sequence[int]]) -> list[int]:
    """Return of a step's ledger: first sample, behind the last, missing ones, repeated ones.

    `samples` are [rank, start, stop] in the epoch's order; all counted exactly once if the last
    two figures are 0.
    """
    if samples:  # nearly always in order, each part behind the one before
        first = reached = samples[0][1]
        for _, start, stop in samples:
            if start != reached or stop <= start:
                break
            reached = stop
        else:
            return [first, reached, 0, 0]
    parts = sorted((start, stop) for _, start, stop in samples if stop > start)
    if not parts:
        return [0, 0, 0, 0]
    missing = repeated = 0
    reached = parts[0][1]
    for start, stop in parts[1:]:
        if start > reached:
            missing += start - reached
        elif start < reached:
            repeated += min(stop, reached) - start
        reached = max(reached, stop)
    return [parts[0][0], reached, missing, repeated]
