"""The results of eval runners: a list of records, TensorBoard, and a link to the best checkpoint.

`evaluations.jsonl` has one line for each checkpoint, even if its runner died: the lines repeat the
claims' records, so another runner writes a missing one.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.reader import BEST_EVALUATED, checkpoint_digest
from trainer.system.errors import StorageError
from trainer.system.regular_file import MOST_LINES, read_file
from trainer.system.storage import atomic_folder
from trainer.system.storage.jsonl import json_text
from trainer.system.untrusted_data import validate_json
from trainer.tracking.trackers.tensorboard_file import TENSORBOARD_FOLDER, TensorBoardFile

EVALUATIONS = "evaluations"
"""Below a run's output folder."""
RECORDS_FILE = "evaluations.jsonl"
SCHEMA = "motley.evaluation/1"

Record = dict[str, Any]

logger = logging.getLogger(__name__)


class Results:
    """The results below one run's output folder.

    Args:
        folder: `evaluations` in the output folder.
        runner: names this runner's curves: TensorBoard follows one file a folder.
    """

    def __init__(self, folder: Path, runner: str) -> None:
        self._path = folder / RECORDS_FILE
        self._curves = folder / TENSORBOARD_FOLDER
        self._board = TensorBoardFile(self._curves / runner, logger.warning)

    def publish(self, record: Record) -> bool:
        """Add a record, unless the list has it; return whether it was added.

        Raises:
            OSError: it cannot be written.
        """
        if not self._append(record):
            return False
        with suppress(OSError):
            self._curves.mkdir(exist_ok=True)
        step, now = record["step"], record["time"]
        for task, outcome in record["tasks"].items():
            figures = outcome.get("figures", {})
            scalars = {f"evaluation/{task}/{name}": value for name, value in figures.items()}
            self._board.record_scalars(
                step, now, {k: v for k, v in scalars.items() if v is not None}
            )
            if "samples" in outcome:
                self._board.record_text(
                    step, now, f"evaluation/{task}", json_text(outcome["samples"], 2)
                )
        return True

    def point_to_best(self, store: Path, rated_by: str) -> None:
        """Point `best-evaluated` at the checkpoint with the best rating by this figure.

        Reads again after each change: of several runners the last one has read all records.

        Raises:
            OSError: the link or the records cannot be read or written.
        """
        link = store / BEST_EVALUATED
        while (best := self._find_best(store, rated_by)) is not None:
            if link.is_symlink() and link.readlink().name == best.name:
                return
            with suppress(FileNotFoundError):  # the run cleaned the folder meanwhile
                atomic_folder.point_link(atomic_folder.Disk(), store, BEST_EVALUATED, best.name)

    def close(self) -> None:
        """Close what is open."""
        self._board.close()

    def _append(self, record: Record) -> bool:
        self._path.parent.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o644), "r+b", buffering=0) as file:
            # Over NFS a lock also makes two hosts append one after the other.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            known = file.read() or b""
            if record["digest"] in _index_by_digest(known):
                return False
            torn = known != b"" and not known.endswith(b"\n")
            line = (b"\n" if torn else b"") + json_text(record).encode() + b"\n"
            if file.write(line) != len(line):
                raise OSError("the disk wrote only part of a line")
            os.fsync(file.fileno())
        return True

    def _find_best(self, store: Path, rated_by: str) -> Path | None:
        rated = [
            record
            for record in read_evaluations(self._path)
            if record.get("rated_by") == rated_by and record["rating"] is not None
        ]
        for record in sorted(rated, key=lambda record: (-record["rating"], record["step"])):
            path = store / record["checkpoint"]
            with suppress(StorageError):  # pruned
                if checkpoint_digest(path) == record["digest"]:
                    return path
        return None


def read_evaluations(path: Path) -> list[Record]:
    """Return the records of an `evaluations.jsonl`, one a checkpoint; torn lines are left out.

    Raises:
        OSError: it cannot be read.
    """
    return list(_index_by_digest(read_file(path, MOST_LINES)).values())


def _index_by_digest(data: bytes) -> Mapping[str, Record]:
    records: dict[str, Record] = {}
    for line in data.split(b"\n"):  # not splitlines: a text may have other line ends
        with suppress(ValueError):
            record = parse_record(line)
            records.setdefault(record["digest"], record)
    return records


def parse_record(data: bytes) -> Record:
    """Return the record in a line of JSON.

    Raises:
        ValueError: it is something else.
    """
    record = validate_json(dict[str, Any], data, RECORDS_FILE, lines=True)
    if record.get("schema") != SCHEMA or not isinstance(record.get("digest"), str):
        raise ValueError(f"{RECORDS_FILE}: no record of {SCHEMA}")
    return record
