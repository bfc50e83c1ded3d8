"""A distillation as the page shows it: which shards are written and read, and what was scored."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from launcher.hosts import ssh
from launcher.runs.records.run import Run
from trainer.system.untrusted_data import validate_json

_EVERY = 5.0
_MOST = 16 << 20
"""Bytes of a file that are read."""
_MOST_CHECKPOINTS = 200

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Text = Annotated[str, Field(max_length=400)]


class _Shard(BaseModel):
    windows: _Count


class _Description(BaseModel):
    shards: Annotated[list[_Shard], Field(max_length=1 << 20)]


class _Task(BaseModel):
    figures: Annotated[dict[_Text, float | None], Field(max_length=64)] = {}
    error: _Text | None = None


class _Score(BaseModel):
    """A line of `evaluations.jsonl`."""

    model_config = ConfigDict(extra="ignore")

    step: _Count
    digest: _Text
    reason: _Text | None = None
    rated_by: _Text | None = None
    rating: float | None = None
    tasks: Annotated[dict[_Text, _Task], Field(max_length=16)] = {}


class Distillation:
    """The folders of a distillation: the logits as the first teacher's host sees them, the scored
    checkpoints as the student's does."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._read_at = -_EVERY
        self._windows: list[int] = []
        """Windows of each shard; empty before a teacher has started."""
        self._written: set[int] = set()
        self._damaged: set[int] = set()
        self._scores: list[_Score] = []
        self._scored = ("", 0)
        """The path and size of the file of `_parse_scores`."""

    def read_on(self, checkpoint: str) -> None:
        """Look again, if the last look is some seconds old.

        Args:
            checkpoint: the folder of the student's last one; empty if there is none.

        Raises:
            LauncherError, OSError: a host or a file cannot be read now.
            ValueError: a file is not what a teacher writes.
        """
        if time.monotonic() - self._read_at < _EVERY:
            return
        self._read_at = time.monotonic()
        self._read_shards()
        if checkpoint:
            self._read_scores(PurePosixPath(checkpoint).parent)

    def _read_shards(self) -> None:
        teacher = next(process for process in self._run.plan.processes if process.role == "teacher")
        host = self._run.find_host(teacher.host)
        connection = ssh.connect_host(host)
        plan = self._run.read_plan_of_host(host, connection)
        there = plan and plan.find_process(teacher.name)
        if not there:
            return
        folder = PurePosixPath(there.report_file).parent.parent
        if not self._windows:
            with suppress(FileNotFoundError):
                text = connection.read(str(folder / "dataset.json"), limit=_MOST)
                shards = validate_json(_Description, text, "dataset.json", least=0).shards
                self._windows = [shard.windows for shard in shards]
        self._written = _parse_shard_numbers(connection.list_folder(str(folder)))
        self._damaged = (
            _parse_shard_numbers(connection.list_folder(str(folder / "quarantine"))) - self._written
        )

    def _read_scores(self, store: PurePosixPath) -> None:
        run = store.parent if store.name == "checkpoints" else store
        path = str(run / "evaluations" / "evaluations.jsonl")
        connection = ssh.connect_host(self._run.leader_host)
        with suppress(FileNotFoundError):
            size = connection.file_size(path)
            if (path, size) != self._scored:
                self._scores = _parse_scores(connection.read(path, max(0, size - _MOST), _MOST))
                self._scored = (path, size)

    def build_tree(self, epoch: int, window: int) -> dict[str, Any]:
        """Return it for the page; the student is at a window of an epoch's order."""
        rated = [score for score in self._scores if score.rating is not None]
        rated = [score for score in rated if score.rated_by == rated[-1].rated_by]
        best = min(rated, key=lambda score: (-(score.rating or 0.0), score.step), default=None)
        return {
            "shards": len(self._windows),
            "written": _group_numbers(self._written),
            "damaged": _group_numbers(self._damaged),
            "read": len(self._windows) if epoch else round(self._shards_before(window), 2),
            "epoch": epoch,
            "scores": [
                _score_entry(score, score is best) for score in self._scores[-_MOST_CHECKPOINTS:]
            ],
        }

    def _shards_before(self, window: int) -> float:
        """Return how many shards the windows before one fill; the first epoch takes them in order,
        but for a few that are mixed."""
        for number, windows in enumerate(self._windows):
            if window < windows:
                return number + window / windows
            window -= windows
        return len(self._windows)


def _parse_shard_numbers(names: list[str]) -> set[int]:
    found = (re.match(r"shard-(\d{5,9})(?!\d)", name) for name in names)
    return {int(match[1]) for match in found if match}


def _group_numbers(numbers: set[int]) -> list[list[int]]:
    """Return numbers as [first, last] of each gapless part."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def _parse_scores(data: bytes) -> list[_Score]:
    """Return the scored checkpoints, each once; lines of another shape are left out."""
    found: dict[str, _Score] = {}
    for line in data.split(b"\n"):
        with suppress(ValueError, RecursionError):
            score = validate_json(_Score, line, "evaluations.jsonl", lines=True)
            found.setdefault(score.digest, score)
    return sorted(found.values(), key=lambda score: score.step)


def _score_entry(score: _Score, best: bool) -> dict[str, Any]:
    figures = {
        f"{task} {name}": value
        for task, outcome in score.tasks.items()
        for name, value in outcome.figures.items()
        if value is not None
    }
    errors = [f"{task}: {one.error}" for task, one in score.tasks.items() if one.error]
    reason = score.reason or "; ".join(errors) or None
    return {"step": score.step, "best": best, "figures": figures, "reason": reason}
