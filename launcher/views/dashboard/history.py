"""The history of a run, read from its `metrics.jsonl` as it grows.

A cursor is the offset behind a line of that file, so it holds for every dashboard of the run and
survives its restart. What the page needs of a line is kept, as JSON; the rest is dropped. Of a
very long run the older half keeps of every 8 steps, later of every 16, and so on, those with the
least and the greatest loss and speed, so that no spike vanishes: what a step tells of all before
it (`so_far`), and a proof (`proofs`), are sums, which no dropped line changes. Validations are
thinned out in the same way, and of checkpoints and answers the last of each group is kept.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from launcher.hosts import ssh
from launcher.runs.processes.log_pages import line_pages
from launcher.runs.records.run import Run
from trainer.config.run import MOST_CLASSES
from trainer.system.received import LARGEST_FLOAT, parse, plain

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
_Figure = Annotated[float, Field(gt=-LARGEST_FLOAT, lt=LARGEST_FLOAT)]
_Word = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=400)]
_Said = Annotated[str, AfterValidator(lambda text: text[:400])]
_Ranks = Annotated[list[_Count], Field(max_length=_MOST_RANKS)]
_Shard = Annotated[list[_Count], Field(min_length=3, max_length=3)]
_Confusion = Annotated[
    list[Annotated[list[_Count], Field(max_length=MOST_CLASSES)]], Field(max_length=MOST_CLASSES)
]
_ByRank = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,6}$")], _Figure], Field(max_length=4096)
]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    step: _Count
    time: _Figure


class _StepLine(_Line):
    """A step: its figures, and what its ledger says of the samples that counted."""

    kind: Literal["step"]
    epoch: _Count = 0
    loss: _Figure | None = None
    learning_rate: _Figure | None = None
    tokens_per_second: _Figure | None = None
    seconds: _Figure | None = None
    exchange_ms: _Figure | None = None
    exchange_exposed_ms: _Figure | None = None
    exchange_bytes: _Count = 0
    ce: _Figure | None = None
    kl: _Figure | None = None
    shares: _ByRank = {}
    worker_seconds: _ByRank | None = None
    worker_overlap_seconds: _ByRank | None = None
    samples: Annotated[list[_Shard], Field(max_length=1 << 17)] = []


class _ValidationLine(_Line):
    kind: Literal["validation"]
    loss: _Figure | None = None
    accuracy: _Figure | None = None
    mcc: _Figure | None = None
    reward_chosen: _Figure | None = None
    reward_rejected: _Figure | None = None
    reward_margin: _Figure | None = None
    reward_accuracy: _Figure | None = None
    confusion: _Confusion | None = None


class _AnswerLine(_Line):
    kind: Literal["answer"]
    number: _Count
    prompt: _Said
    text: _Said


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


_Known = _StepLine | _ValidationLine | _AnswerLine | _EventLine
_LINE: TypeAdapter[_Known] = TypeAdapter(Annotated[_Known, Field(discriminator="kind")])


@dataclass(slots=True)
class _Read:
    """A line that was read: what is kept of it if it is."""

    end: int
    record: _Known
    added: dict[str, Any]
    kind: int
    """Lines of a kind are thinned out together; 0: never."""

    @property
    def figures(self) -> tuple[float, ...]:
        """The figures whose extremes are kept; NaN where there is none."""
        if isinstance(self.record, _StepLine):
            shown = self.record.loss, self.record.tokens_per_second
        elif isinstance(self.record, _ValidationLine):
            shown = self.record.loss, self.record.accuracy
        else:
            shown = None, None
        return tuple(math.nan if value is None else value for value in shown)

    def text(self) -> str:
        """Return it as JSON, without what the page does not show."""
        unsent = {"confusion"}
        if isinstance(self.record, _StepLine):
            unsent = {"samples", "exchange_bytes"}
        text = self.record.model_dump_json(exclude_none=True, exclude=unsent)
        if not self.added:
            return text
        return f"{text[:-1]},{json.dumps(self.added, separators=(',', ':'))[1:]}"


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
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._ends, self._lines = array("Q"), list[str]()
        self._steps, self._kinds = array("Q"), array("Q")
        """The step and the kind of each line; see `_Read`."""
        self._figures: tuple[array[float], ...] = (array("d"), array("d"))
        self._every = 1
        """Steps of the older half of which the extremes are kept."""
        self._size = 0
        self._proofs = 0
        self.confusion: tuple[int, list[list[int]]] | None = None
        """The step of the last validation with a confusion matrix, and the matrix."""
        self._so_far = SoFar()
        self._begun = set[int]()
        """Kinds of which there was a line: the first is never dropped."""
        self._keep_next = True
        """Whether the next step is never dropped: the first, or one behind a loss."""

    def read_on(self) -> None:
        """Take what was written since; a file that became shorter is read from its beginning.

        Raises:
            LauncherError, OSError: the leader's host or its file cannot be read now.
        """
        connection = ssh.connect(self.run.head)
        if self._path is None:
            plan = self.run.plan_by(self.run.head, connection)
            if plan is None:
                return
            self._path = f"{plan.output}/{METRICS_FILE}"
        path = self._path
        with self._lock:
            if (size := connection.size(path)) < self._offset:
                self._begin()

            def read(offset: int, limit: int) -> bytes:
                return connection.read(path, offset, limit)

            for page in line_pages(read, self._offset, whole=False):
                found: list[_Read] = []
                end = self._offset
                for line in page.lines:
                    end += len(line) + 1
                    if (record := parsed(line)) is not None:
                        found.append(self._count(record, end))
                self._offset = page.end
                self._keep(found, is_far=size - page.end > 2 * self._most, size=size)
                while self._size > self._most and self._thin_out():
                    pass

    def after(self, cursor: int) -> tuple[int, str] | None:
        """Return the cursor behind the last line, and the lines after a cursor as a JSON array.

        None: the cursor is of a file that is gone, and its reader begins again at 0.
        """
        with self._lock:
            if cursor > self._offset:
                return None
            lines = self._lines[bisect_right(self._ends, cursor) :]
            return self._offset, f"[{','.join(lines)}]"

    @property
    def place(self) -> tuple[int, int]:
        """The epoch of the last step, and the sample behind it in the epoch's order."""
        return self._so_far.place or (0, 0)

    def _count(self, record: _Known, end: int) -> _Read:
        """Add a line to the sums, and return it with what it tells of them."""
        added: dict[str, Any] = {}
        kind = 0
        if isinstance(record, _StepLine):
            ledger = counted(record.samples)
            added = {"counted": ledger, "so_far": self._so_far.add(record, ledger)}
            kind, self._keep_next = 0 if self._keep_next else _STEP, False
        elif isinstance(record, _ValidationLine):
            kind = _VALIDATION
            if record.confusion:
                self.confusion = record.step, record.confusion
        elif isinstance(record, _AnswerLine):
            kind = _ANSWER + record.number
        elif record.event == "verified":
            self._proofs += 1
            added, kind = {"proofs": self._proofs}, _PROOF
        elif record.event == "checkpoint":
            kind = _CHECKPOINT
        elif record.event in ("lost", "resumed"):
            self._keep_next = True  # it tells how long this held up the run
            if record.event == "resumed":
                self._so_far.return_to(record.step)
                if self.confusion and self.confusion[0] > record.step:
                    self.confusion = None
        if kind > _PROOF and kind not in self._begun:
            self._begun.add(kind)
            kind = 0
        return _Read(end, record, added, kind)

    def _keep(self, found: list[_Read], *, is_far: bool, size: int) -> None:
        """Keep lines; of those far from the file's end, what thinning out would leave of them."""
        if is_far:
            self._every = max(self._every, 1 << (4 * size // self._most).bit_length() - 1)
            steps, kinds = [each.record.step for each in found], [each.kind for each in found]
            figures = tuple(zip(*(each.figures for each in found), strict=True))
            found = list(compress(found, _choose(steps, kinds, figures, self._every)))
        for each in found:
            text = each.text()
            self._ends.append(each.end)
            self._lines.append(text)
            self._steps.append(each.record.step)
            self._kinds.append(each.kind)
            for figures, value in zip(self._figures, each.figures, strict=True):
                figures.append(value)
            self._size += len(text)

    def _thin_out(self) -> bool:
        """Drop at least every second line of the older half that may be; return if any may be."""
        half = len(self._lines) // 2
        furthest = max(compress(self._steps[:half], self._kinds), default=0)
        keep = self._kept(half)
        while sum(keep) > half // 2 and self._every <= furthest:
            self._every *= 2
            keep = self._kept(half)
        dropped = sum(keep) < half
        keep += b"\1" * (len(self._lines) - half)
        self._ends = array("Q", compress(self._ends, keep))
        self._steps = array("Q", compress(self._steps, keep))
        self._kinds = array("Q", compress(self._kinds, keep))
        self._figures = tuple(array("d", compress(each, keep)) for each in self._figures)
        self._lines = list(compress(self._lines, keep))
        self._size = sum(map(len, self._lines))
        return dropped

    def _kept(self, half: int) -> bytearray:
        """Return for each line of the older half whether it is kept."""
        return _choose(self._steps[:half], self._kinds[:half], self._figures, self._every)


def _choose(
    steps: Sequence[int], kinds: Sequence[int], figures: Sequence[Sequence[float]], every: int
) -> bytearray:
    """Return for each line whether it is kept, of groups of so many steps."""
    keep = bytearray(not kind for kind in kinds)
    of_kind: dict[int, list[int]] = {}
    for at, kind in enumerate(kinds):
        if kind:
            of_kind.setdefault(kind, []).append(at)
    for kind, places in of_kind.items():
        for _, group in groupby(places, lambda at: steps[at] // every):
            lines = list(group)
            kept = set[int]() if kind == _STEP else {lines[-1]}
            if kind in (_STEP, _VALIDATION):
                kept.update(_extremes(lines, figures))
            for at in kept:
                keep[at] = 1
    return keep


def _extremes(lines: list[int], figures: Sequence[Sequence[float]]) -> Iterable[int]:
    """Return of some lines those with the least and the greatest of each figure."""
    if len(lines) <= 2 * len(figures):
        return lines
    found: set[int] = set()
    for each in figures:
        if known := [at for at in lines if not math.isnan(each[at])]:
            found |= {min(known, key=each.__getitem__), max(known, key=each.__getitem__)}
    return found or lines[:1]


class SoFar:
    """Sums over the steps that count: samples, missing and repeated ones, tokens, and bytes.

    A resumed run goes on with the sums of the step from which it does.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        """The epoch of the last step, and the sample behind it in the epoch's order."""
        self._sums = [0, 0, 0, 0, 0]
        self._at = OrderedDict[int, tuple[tuple[int, int], list[int]]]()
        """By step, of the last ones."""

    def add(self, step: _StepLine, ledger: Sequence[int]) -> list[int]:
        """Count a step, of which the ledger was `counted`, and return the sums."""
        first, behind, missing, repeated = ledger
        samples = behind - first - missing
        if self.place is not None and self.place[0] == step.epoch:
            missing += max(0, first - self.place[1])
            repeated += max(0, self.place[1] - first)
        tokens = round((step.tokens_per_second or 0.0) * (step.seconds or 0.0))
        self.place = (step.epoch, behind)
        added = (samples, missing, repeated, tokens, step.exchange_bytes)
        self._sums = [total + more for total, more in zip(self._sums, added, strict=True)]
        self._at.pop(step.step, None)
        self._at[step.step] = self.place, self._sums
        if len(self._at) > _MOST_BACK:
            self._at.popitem(last=False)
        return self._sums

    def return_to(self, step: int) -> None:
        """Forget the steps behind one; of one that is too long ago nothing is known."""
        self.place, self._sums = self._at.get(step, (None, self._sums if step else [0] * 5))


def parsed(line: bytes) -> _Known | None:
    """Return what the page shows of a line; None for one that it does not."""
    with suppress(ValueError):
        return _LINE.validate_json(line)  # nearly all lines, in a fraction of the time
    try:
        tree: Any = parse(line, METRICS_FILE)
        return _LINE.validate_python(plain(tree) if isinstance(tree, dict) else tree)  # pyright: ignore[reportUnknownArgumentType] - JSON
    except (ValueError, RecursionError):
        return None


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
    for start, stop in parts[1:]:
        if start > reached:
            missing += start - reached
        elif start < reached:
            repeated += min(stop, reached) - start
        reached = max(reached, stop)
    return [parts[0][0], reached, missing, repeated]
