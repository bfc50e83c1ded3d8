"""A run's metrics: one JSON object a line, and the same numbers for TensorBoard.

A failed write never stops training: a full disk raises one alarm, and writing resumes when there
is space again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.system.received import receive_json
from trainer.system.storage.jsonl import LineFile, Outage, json_text

if TYPE_CHECKING:
    from trainer.exchange.protocol.actions import Step

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

EventKind = Literal[
    "listening",
    "joined",
    "lost",
    "idle",
    "active",
    "behind",
    "rejoined",
    "refused",
    "redealt",
    "residual_lost",
    "codec",
    "schedule",
    "carried",
    "verified",
    "diverged",
    "unproved",
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


_UNRECORDED = ("codec", "round_of", "watts")
"""Fields of a step that its line does not have."""


class MetricsLog:
    """Writes `metrics.jsonl` and `tensorboard/` below a run's output folder.

    Lines have a `kind`: `step` (the fields of `Step` that are not None), `validation`, `answer`
    (`number`, `prompt`, `text`, `tokens` and `ended` of one of the prompts), or `event`
    (an `event` of EventKind with `rank`, `reason` and more where they apply). After a `resumed`
    event of step k, earlier lines of later steps are void, but stay in the file.
    """

    def __init__(
        self,
        output: Path,
        *,
        tensorboard: bool = True,
        on_alarm: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._path = output / METRICS_FILE
        self._lines = LineFile(self._path, on_alarm)
        self._board = (
            TensorBoardFile(output / TENSORBOARD_FOLDER, on_alarm) if tensorboard else None
        )

    def has_steps(self) -> bool:
        """Whether the file has steps, of this process or an earlier one, that are not void."""
        return self._path.exists() and any(
            record.get("kind") == "step" for record in read_metrics(self._path)
        )

    def step(self, event: Step) -> None:
        """Record a committed step."""
        record = {
            name: value
            for name, value in asdict(event).items()
            if name not in _UNRECORDED and (value is not None or name == "loss")
        }
        self._write("step", record)
        if self._board:
            self._board.scalars(event.step, self._clock(), dict(_scalars(record)))

    def validation(
        self, step: int, confusion: list[list[int]] | None = None, **figures: float | None
    ) -> None:
        """Record a validation: `loss`, and of a classifier `accuracy`, `mcc` and its matrix.

        Args:
            confusion: counts as `confusion[label][prediction]`.
        """
        table = {} if confusion is None else {"confusion": confusion}
        self._write("validation", {"step": step, **figures, **table})
        if self._board:
            scalars = {f"validation/{k}": v for k, v in figures.items() if v is not None}
            self._board.scalars(step, self._clock(), scalars)

    def answer(self, step: int, **details: Any) -> None:
        """Record the answer to a prompt."""
        self._write("answer", {"step": step, **details})
        if self._board:
            text = f"{details['prompt']}\n\n{details['text']}"
            self._board.text(step, self._clock(), f"answers/{details['number']}", text)

    def event(self, event: EventKind, step: int, **details: Any) -> None:
        """Record an event of the run or of one member."""
        self._write("event", {"event": event, "step": step, **details})
        if self._board:
            if event == "resumed":
                self._board.restarted(step, self._clock())
            told = "  ".join(f"{key}={value}" for key, value in details.items())
            self._board.text(step, self._clock(), "events", f"{event}  {told}".rstrip())

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        if self._board:
            self._board.close()

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        line = {"kind": kind, "time": round(self._clock(), 3), **record}
        self._lines.write(json_text(line))


def read_metrics(path: Path, *, abandoned: bool = False) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; lines that are torn or no JSON of ours are left out.

    Steps, validations and answers that a later `resumed` event made void are left out too, unless
    `abandoned` asks for them.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):  # not splitlines: a text may have other line ends
        try:
            record = receive_json(dict[str, Any], line, METRICS_FILE, lines=True)
        except ValueError:
            continue
        if not abandoned and record.get("event") == "resumed":
            kept = record.get("step", 0)
            records = [r for r in records if r.get("kind") == "event" or r.get("step", 0) <= kept]
        records.append(record)
    return records


class TensorBoardFile:
    """TensorBoard event files, through tensorboard's own framing and messages.

    Not its EventFileWriter: its thread prints a traceback on a full disk,
    and it loads TensorFlow if that is installed. A failed record makes the rest of a file
    unreadable, so writing continues in a new one.
    """

    def __init__(self, folder: Path, on_alarm: Callable[[str], None]) -> None:
        self._folder = folder
        self._outage = Outage(folder, on_alarm)
        self._records: Any = None
        self._available = True
        self._files = 0

    def scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Record figures by their tags."""
        summary = [{"tag": tag, "simple_value": float(value)} for tag, value in values.items()]
        self._write({"wall_time": now, "step": step, "summary": {"value": summary}})

    def text(self, step: int, now: float, tag: str, content: str) -> None:
        """Record a text."""
        value = {
            "tag": tag,
            "metadata": {"plugin_data": {"plugin_name": "text"}},
            "tensor": {
                "dtype": "DT_STRING",
                "tensor_shape": {"dim": [{"size": 1}]},
                "string_val": [content.encode()],
            },
        }
        self._write({"wall_time": now, "step": step, "summary": {"value": [value]}})

    def restarted(self, step: int, now: float) -> None:
        """Tell TensorBoard to drop the steps after `step`."""
        self._write({"wall_time": now, "step": step + 1, "session_log": {"status": "START"}})

    def close(self) -> None:
        """Close the file; a later record opens another."""
        if self._records is not None:
            with suppress(OSError):
                self._records.close()
            self._records = None

    def _write(self, event: dict[str, Any]) -> None:
        if not self._available:
            return
        try:
            # Imported here: a quarter of a second that readers of metrics do not need.
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            self._available = False
            self._outage.begin("the package tensorboard is not installed")
            return

        messages: Any = event_pb2  # its classes are built at run time, unseen by type checkers

        def serialized(tree: dict[str, Any]) -> bytes:
            return _message(messages.Event(), tree).SerializeToString()

        try:
            if self._records is None:
                self._records = RecordWriter(self._open())
                version = {"wall_time": event["wall_time"], "file_version": "brain.Event:2"}
                self._records.write(serialized(version))
            self._records.write(serialized(event))
            self._outage.end()
        except OSError as error:
            self.close()
            self._outage.begin(error.strerror or str(error))

    def _open(self) -> Any:
        self._folder.mkdir(exist_ok=True)  # not its parent: a share may be unreachable
        self._files += 1
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{self._files}"
        return _WholeWrites((self._folder / f"events.out.tfevents.{stamp}").open("xb", buffering=0))


class _WholeWrites:
    """A file whose short writes are errors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        if self._file.write(data) != len(data):
            raise OSError("the disk wrote half a record")

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        self._file.close()


def _message(message: Any, tree: Mapping[str, Any]) -> Any:
    """Fill a protobuf message from a tree of plain values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            target = getattr(message, name)
            target.SetInParent()
            _message(target, value)
        elif isinstance(value, list):
            target = getattr(message, name)
            for item in value:
                if isinstance(item, dict):
                    _message(target.add(), item)
                else:
                    target.append(item)
        elif isinstance(value, str) and (enum := message.DESCRIPTOR.fields_by_name[name].enum_type):
            setattr(message, name, enum.values_by_name[value].number)
        else:
            setattr(message, name, value)
    return message


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield TensorBoard's tags: the names of the lines, per rank below them."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            tag = name.removeprefix("worker_")
            yield from ((f"{tag}/rank_{rank}", part) for rank, part in value.items())
        elif name not in ("step", "samples", "together") and value is not None:
            yield name, value
