"""TensorBoard's event files, written at once, without a thread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.system.storage.jsonl import Outage
from trainer.tracking.trackers.base import Tracker

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoardFile(Tracker):
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

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Record figures by their tags."""
        summary = [{"tag": tag, "simple_value": float(value)} for tag, value in values.items()]
        self._write_event({"wall_time": now, "step": step, "summary": {"value": summary}})

    def record_text(self, step: int, now: float, tag: str, content: str) -> None:
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
        self._write_event({"wall_time": now, "step": step, "summary": {"value": [value]}})

    def on_restart(self, step: int, now: float) -> None:
        """Tell TensorBoard to drop the steps after `step`."""
        self._write_event({"wall_time": now, "step": step + 1, "session_log": {"status": "START"}})

    def close(self, exit_code: int = 0) -> None:  # noqa: ARG002 - as Tracker has it
        """Close the file; a later record opens another."""
        if self._records is not None:
            with suppress(OSError):
                self._records.close()
            self._records = None

    def _write_event(self, event: dict[str, Any]) -> None:
        if not self._available:
            return
        try:
            # Imported here: a quarter of a second that readers of metrics do not need.
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            self._available = False
            self._outage.note_failure("the package tensorboard is not installed")
            return

        messages: Any = event_pb2  # its classes are built at run time, unseen by type checkers

        def serialize_message(tree: dict[str, Any]) -> bytes:
            return _make_message(messages.Event(), tree).SerializeToString()

        try:
            if self._records is None:
                self._records = RecordWriter(self._open_writer())
                version = {"wall_time": event["wall_time"], "file_version": "brain.Event:2"}
                self._records.write(serialize_message(version))
            self._records.write(serialize_message(event))
            self._outage.note_success()
        except OSError as error:
            self.close()
            self._outage.note_failure(error.strerror or str(error))

    def _open_writer(self) -> Any:
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
            raise OSError("the disk wrote only part of a record")

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        self._file.close()


def _make_message(message: Any, tree: Mapping[str, Any]) -> Any:
    """Fill a protobuf message from a tree of plain values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            target = getattr(message, name)
            target.SetInParent()
            _make_message(target, value)
        elif isinstance(value, list):
            target = getattr(message, name)
            for item in value:
                if isinstance(item, dict):
                    _make_message(target.add(), item)
                else:
                    target.append(item)
        elif isinstance(value, str) and (enum := message.DESCRIPTOR.fields_by_name[name].enum_type):
            setattr(message, name, enum.values_by_name[value].number)
        else:
            setattr(message, name, value)
    return message
