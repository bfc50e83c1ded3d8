"""A run's metrics: one JSON object a line, and the same numbers for trackers.

A failed write never stops training: a full disk raises one alarm, and writing resumes when there
is space again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.system.regular_file import MOST_LINES, read_file
from trainer.system.storage.jsonl import LineFile, json_text
from trainer.system.untrusted_data import validate_json

if TYPE_CHECKING:
    from trainer.exchange.protocol.actions import Step
    from trainer.tracking.trackers.base import Tracker

METRICS_FILE = "metrics.jsonl"

EventKind = Literal[
    "listening",
    "joined",
    "lost",
    "idle",
    "active",
    "lagging",
    "rejoined",
    "refused",
    "reassigned",
    "residual_lost",
    "codec",
    "verified",
    "diverged",
    "unverified",
    "outlier",
    "halted",
    "resumed",
    "checkpoint",
    "stopping",
    "stopped",
    "finished",
    "alarm",
    "waiting",
    "quarantined",
]

logger = logging.getLogger(__name__)


_UNRECORDED = ("codec", "inner_steps", "watts")
"""Fields of a step that its line does not have."""


class MetricsLog:
    """Writes `metrics.jsonl` below a run's output folder, and tells trackers the same.

    Lines have a `kind`: `step` (the fields of `Step` that are not None), `validation`, `answer`
    (`number`, `prompt`, `text`, `tokens` and `ended` of one of the prompts), or `event`
    (an `event` of EventKind with `rank`, `reason` and more where they apply). After a `resumed`
    event of step k, earlier lines of later steps are void, but stay in the file.
    """

    def __init__(
        self,
        output: Path,
        trackers: Sequence[Tracker] = (),
        *,
        on_alarm: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._path = output / METRICS_FILE
        self._lines = LineFile(self._path, on_alarm)
        self._trackers = trackers

    def has_steps(self) -> bool:
        """Whether the file has steps, of this process or an earlier one, that are not void."""
        return self._path.exists() and any(
            record.get("kind") == "step" for record in read_metrics(self._path)
        )

    def record_step(self, event: Step) -> None:
        """Record a committed step."""
        record = {
            name: value
            for name, value in asdict(event).items()
            if name not in _UNRECORDED and (value is not None or name == "loss")
        }
        self._write_line("step", record)
        scalars = dict(_iterate_scalars(record)) if self._trackers else {}
        for tracker in self._trackers:
            tracker.record_scalars(event.step, self._clock(), scalars)

    def record_validation(
        self,
        step: int,
        confusion: list[list[int]] | None = None,
        figures: Mapping[str, float] | None = None,
        **scores: float | None,
    ) -> None:
        """Record a validation: `loss`, of a classifier `accuracy`, `mcc` and its matrix, of pairs
        `reward_chosen`, `reward_rejected`, `reward_margin` and `reward_accuracy`.

        Args:
            confusion: counts as `confusion[label][prediction]`.
            figures: of a script, by its own names.
        """
        table = {"confusion": confusion, "figures": figures}
        table = {name: part for name, part in table.items() if part}
        self._write_line("validation", {"step": step, **scores, **table})
        scalars = {**scores, **(figures or {})}
        scalars = {f"validation/{k}": v for k, v in scalars.items() if v is not None}
        for tracker in self._trackers:
            tracker.record_scalars(step, self._clock(), scalars)

    def record_answer(self, step: int, **details: Any) -> None:
        """Record the answer to a prompt."""
        self._write_line("answer", {"step": step, **details})
        text = f"{details['prompt']}\n\n{details['text']}"
        for tracker in self._trackers:
            tracker.record_text(step, self._clock(), f"answers/{details['number']}", text)

    def record_event(self, event: EventKind, step: int, **details: Any) -> None:
        """Record an event of the run or of one member."""
        self._write_line("event", {"event": event, "step": step, **details})
        text = "  ".join(f"{key}={value}" for key, value in details.items())
        for tracker in self._trackers:
            if event == "resumed":
                tracker.on_restart(step, self._clock())
            tracker.record_text(step, self._clock(), "events", f"{event}  {text}".rstrip())

    def close(self, exit_code: int = 0) -> None:
        """Close the file and the trackers, which are told how the run ended."""
        self._lines.close()
        for tracker in self._trackers:
            tracker.close(exit_code)

    def _write_line(self, kind: str, record: Mapping[str, Any]) -> None:
        line = {"kind": kind, "time": round(self._clock(), 3), **record}
        self._lines.write(json_text(line))


def read_metrics(path: Path, *, abandoned: bool = False) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; lines that are torn or no JSON of ours are left out.

    Steps, validations and answers that a later `resumed` event made void are left out too, unless
    `abandoned` asks for them.
    """
    records: list[dict[str, Any]] = []
    # Not splitlines: a text may have other line ends.
    for line in read_file(path, MOST_LINES).split(b"\n"):
        try:
            record = validate_json(dict[str, Any], line, METRICS_FILE, lines=True)
        except ValueError:
            continue
        if not abandoned and record.get("event") == "resumed":
            kept = record.get("step", 0)
            records = [r for r in records if r.get("kind") == "event" or r.get("step", 0) <= kept]
        records.append(record)
    return records


def _iterate_scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the trackers' tags: the names of the lines, per rank below them."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            tag = name.removeprefix("worker_")
            yield from ((f"{tag}/rank_{rank}", part) for rank, part in value.items())
        elif name not in ("step", "sample_ranges") and value is not None:
            yield name, value
