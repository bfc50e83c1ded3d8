"""status.json: the state of a run, for `launch status` and the live view.

The coordinator replaces the file atomically; a reader never sees half of it. A change of state is
written at once, moving numbers at most a few times a second.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from trainer.system.errors import RESTARTED, StorageError
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import replace_file
from trainer.system.storage.jsonl import Outage, json_text
from trainer.system.untrusted_data import validate_json

STATUS_FILE = "status.json"
SCHEMA = "motley.status/2"

RunState = Literal["waiting", "running", "stopping", "completed", "stopped", "failed"]
"""The last three are final: all steps are done, the run was stopped before, or it failed
(`reason` and `exit_code` tell why)."""
WorkerState = Literal["joining", "active", "idle", "lost"]

logger = logging.getLogger(__name__)


class WorkerStatus(TypedDict):
    """One worker; the figures are of its last step."""

    rank: int
    host: str
    device: str
    backend: str
    backend_reason: str
    """Why no earlier backend of the chain was taken; empty for the first."""
    state: WorkerState
    samples: int
    step_seconds: float | None
    tokens_per_second: float | None


class CheckpointStatus(TypedDict):
    """The last checkpoint that is on the disk."""

    step: int
    path: str


class ValidationStatus(TypedDict):
    """The last validation: of a classifier, of pairs, or with a script's own figures."""

    step: int
    loss: float
    accuracy: float | None
    mcc: float | None
    reward_margin: float | None
    reward_accuracy: float | None
    figures: dict[str, float]


class Status(TypedDict):
    """One run; `schema` and `updated` (Unix seconds) are added when it is written."""

    run_id: str
    state: RunState
    reason: str | None
    exit_code: int | None
    """Exit code of a run that has ended."""
    pid: int
    step: int
    total_steps: int
    epoch: int
    loss: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    unit: str
    """The unit of that rate: "tokens", or "samples" of a script."""
    exchange_ms: float | None
    """Milliseconds of the last step, from the slowest worker's first gradient to the commit."""
    exchange_exposed_ms: float | None
    """Part of these that was not hidden behind backward."""
    codec: str | None
    """Codec of the last step, as a setting; flush steps of rounds are in bf16 all the same."""
    inner_steps: int | None
    """The inner steps of a round, if the last step was one."""
    generation: int
    expect_workers: int
    workers: list[WorkerStatus]
    checkpoint: CheckpointStatus | None
    validation: ValidationStatus | None
    budget: dict[str, Any] | None
    """Budget of a run that has one: `spent`, `ceiling`, `currency`, `hourly_cost` at the present
    power, and `measured_hosts`, whose power is measured."""
    summary: list[str]
    """Result of a run that ended with exit code 0, in lines for people."""
    notify_failure: str | None
    """Why the command for notifications failed at the last event; null if it did not."""


def first_status(
    run_id: str, total_steps: int, expect_workers: int, unit: str = "tokens"
) -> Status:
    """Return the status of a run of this process before its first event."""
    return Status(
        run_id=run_id,
        state="waiting",
        reason=None,
        exit_code=None,
        pid=os.getpid(),
        step=0,
        total_steps=total_steps,
        epoch=0,
        loss=None,
        learning_rate=None,
        tokens_per_second=None,
        unit=unit,
        exchange_ms=None,
        exchange_exposed_ms=None,
        codec=None,
        inner_steps=None,
        generation=0,
        expect_workers=expect_workers,
        workers=[],
        checkpoint=None,
        validation=None,
        budget=None,
        summary=[],
        notify_failure=None,
    )


MOVING = (
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "tokens_per_second",
    "exchange_ms",
    "exchange_exposed_ms",
)
"""The figures that every step changes."""
_MOVING_OF_WORKER = ("samples", "step_seconds", "tokens_per_second")


class StatusFile:
    """Writes one run's status; a failure is an alarm and never ends the run."""

    def __init__(
        self,
        output: Path,
        *,
        interval: float = 0.5,
        on_alarm: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = output / STATUS_FILE
        self._interval = interval
        self._outage = Outage(self.path, on_alarm)
        self._clock = clock
        self._written_at = -float("inf")
        self._standing: dict[str, Any] | None = None

    def write_if_due(self, status: Status, *, force: bool = False) -> bool:
        """Write the status if its state changed or the interval is over; return whether it did."""
        now = self._clock()
        standing = _urgent_parts(status)
        if not force and standing == self._standing and now - self._written_at < self._interval:
            return False
        tree = {"schema": SCHEMA, **status, "updated": round(time.time(), 3)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json_text(tree, indent=2) + "\n")
        except OSError as error:
            self._outage.note_failure(error.strerror or str(error))
            return False
        self._outage.note_success()
        self._written_at, self._standing = now, standing
        return True


def read_status(path: Path) -> dict[str, Any]:
    """Return a status file's content.

    Raises:
        StorageError: it is missing, damaged, or of another version.
    """
    try:
        tree = validate_json(dict[str, Any], read_file(path), str(path), lines=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StorageError(str(error)) from None
    if tree.get("schema") != SCHEMA:
        raise StorageError(f"{path}: not a status of {SCHEMA}")
    return tree


def say_last(output: Path, status: Status) -> None:
    """Write how a run ended before it began, unless the folder is another run's."""
    with suppress(StorageError):
        if read_status(output / STATUS_FILE).get("run_id") != status["run_id"]:
            return
    StatusFile(output).write_if_due(status)


def says_over(path: Path) -> bool:
    """Whether a status file shows that its run is over, not only that an attempt failed.

    False for an unreadable file.
    """
    try:
        status = read_status(path)
    except StorageError:
        return False
    failed_for_good = status.get("state") == "failed" and status.get("exit_code") not in RESTARTED
    return status.get("state") in ("completed", "stopped") or failed_for_good


def _urgent_parts(status: Status) -> dict[str, Any]:
    """Return the parts of a status that are written at once."""
    moving = (*MOVING, "budget")
    tree: dict[str, Any] = {k: copy.deepcopy(v) for k, v in status.items() if k not in moving}
    tree["workers"] = [
        {key: value for key, value in worker.items() if key not in _MOVING_OF_WORKER}
        for worker in status["workers"]
    ]
    return tree
