"""The eval runner: scores a run's checkpoints as they appear, each once, by one runner.

The newest comes first, since its figures matter most; older ones follow while there is time. A
checkpoint that is pruned before it was scored is recorded as skipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.checkpoint.trained_model import TrainedModel, load_trained
from trainer.config.data import LostText
from trainer.evaluate.base import Outcome, Task
from trainer.evaluate.claims import Claim, Claims
from trainer.evaluate.results import EVALUATIONS, SCHEMA, Record, Results
from trainer.evaluate.watcher import Checkpoint, WatchedRun
from trainer.model.output_folder import refuse_links
from trainer.replica.backend import Compute
from trainer.replica.wgpu.gpu.errors import LostError
from trainer.system.errors import InputError, StorageError, TrainerError
from trainer.system.process.interruption import Interrupted, Interruption
from trainer.system.storage.removal import pin_folder
from trainer.tracking.student_watch import StudentWatch, ends_with_student

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """The options of a runner."""

    name: str
    """Name of the runner, in records and TensorBoard."""
    every: float = 10.0
    """Seconds between two checks of the folder."""
    claim_timeout: float = 60.0
    """Seconds of silence after which another runner's claim is void; the same for all runners."""
    once: bool = False
    """Score the existing ones and end; else continue until the run is over."""
    base: str | None = None
    """The base model of an adapter, if it is not at the adapter's stored path."""
    max_seq_len: int | None = None
    lost_text: LostText | None = None
    """None: as trained."""
    with_student: bool = False
    """End at once with a run that ends early, or shows no sign of life; it waits for the scores."""


class _GoneError(Exception):
    """A checkpoint was removed while it was read."""


class Runner:
    """One eval runner over one run's folder, which need not exist yet."""

    def __init__(
        self, output: Path, tasks: Sequence[Task], compute: Compute, options: RunnerOptions
    ) -> None:
        self._output, self._tasks, self._compute, self._options = output, tasks, compute, options
        self._run = WatchedRun(output)
        folder = output / EVALUATIONS
        refuse_links((folder, *folder.glob("*")))  # the folder may have been copied here
        self._claims = Claims(folder / "claims", options.name, options.claim_timeout)
        self._results = Results(folder, options.name)
        self._interruption = Interruption()
        self._pause = min(options.every, options.claim_timeout / 4)  # claims must be checked often
        self._unscored: dict[str, Checkpoint] = {}
        self._damaged: set[str] = set()
        self._published: set[str] = set()
        self._rated_by: str | None = None  # of results that the link may not reflect yet
        self._last_message = ""

    def run(self) -> None:
        """Score until the run is over and all its checkpoints have a result, or until SIGTERM.

        Raises:
            InputError: something that the checkpoints need, such as an adapter's base, is missing.
            TrainerError: the device was lost.
        """
        with ExitStack() as stack:
            stack.enter_context(self._interruption.handle_signals())
            if self._options.with_student:
                watch = StudentWatch(self._output, unless_completed=True)
                stack.enter_context(ends_with_student(watch, self._interruption))
            try:
                self._watch()
            except Interrupted as reason:
                logger.info("%s", reason)
            finally:
                self._results.close()

    def _watch(self) -> None:
        while True:
            over = self._run.is_over  # read first, so that all checkpoints before the end are found
            if self._score_one():
                continue
            if self._options.once or (over and not self._unscored):
                return
            self._interruption.sleep(self._pause)

    def _score_one(self) -> bool:
        """Score the newest available checkpoint; False if there is none."""
        try:
            found = self._run.list_checkpoints()
            if not found:
                self._log_once(f"{self._output}: no checkpoint there, waiting")
                return False
            states = self._claims.read_states()
            results = {digest: s.record for digest, s in states.items() if s.record is not None}
            self._publish(results)
        except OSError as error:
            self._log_once(f"{self._output}: {error.strerror or error}; waiting")
            return False
        self._unscored |= {checkpoint.digest: checkpoint for checkpoint in found}
        for digest in list(self._unscored):
            if digest in self._damaged or digest in results:
                del self._unscored[digest]
        newest_first = sorted(self._unscored.values(), key=lambda c: c.step, reverse=True)
        for checkpoint in newest_first:
            if (claim := self._take_claim(checkpoint)) is not None:
                self._score_claimed(claim, checkpoint)
                return True
        return False

    def _take_claim(self, checkpoint: Checkpoint) -> Claim | None:
        try:
            return self._claims.take_claim(checkpoint.digest)
        except OSError as error:
            self._log_once(f"{self._output}: cannot be written: {error.strerror or error}; waiting")
        except (InputError, StorageError) as error:
            self._log_once(f"{error}; waiting")
        return None

    def _score_claimed(self, claim: Claim, checkpoint: Checkpoint) -> None:
        try:
            # The checkpoint is pinned until its result is safe and the link may point to it.
            with ExitStack() as pins:
                record = self._score_checkpoint(checkpoint, pins)
                if record is not None:
                    self._deliver(claim, record)
        finally:
            claim.release()

    def _score_checkpoint(self, checkpoint: Checkpoint, pins: ExitStack) -> Record | None:
        """Return the record of a checkpoint, None for a damaged one."""
        began = time.monotonic()

        def load() -> TrainedModel:
            pins.enter_context(pin_folder(checkpoint.path))
            options = self._options
            return load_trained(
                checkpoint.path, options.base, options.max_seq_len, options.lost_text
            )

        try:
            trained = self._retry_read(checkpoint, load)
        except _GoneError:
            return self._build_record(checkpoint, {}, began, "removed before it was scored")
        except StorageError as error:
            self._run.log_skipped(str(error))
            self._damaged.add(checkpoint.digest)
            return None
        outcomes = {task.name: self._run_task(checkpoint, task, trained) for task in self._tasks}
        return self._build_record(checkpoint, outcomes, began)

    def _run_task(self, checkpoint: Checkpoint, task: Task, trained: TrainedModel) -> Outcome | str:
        """Return a task's result, or why it failed: the others continue."""
        try:
            return self._retry_read(checkpoint, lambda: task.run(trained, self._compute))
        except _GoneError:
            reason = "the checkpoint was removed while it was read"
        except LostError:
            raise
        except TrainerError as error:
            reason = str(error)
        except Exception as error:  # a library's, or a defect: the other tasks' figures still count
            logger.exception("%s: task %s failed", checkpoint.path.name, task.name)
            return f"{type(error).__name__}: {error}"
        logger.warning("%s: task %s failed: %s", checkpoint.path.name, task.name, reason)
        return reason

    def _retry_read(self, checkpoint: Checkpoint, read: Callable[[], _Value]) -> _Value:
        """Run `read`; again if it fails, and if the folder was unreachable.

        Raises:
            _GoneError: the checkpoint was removed.
        """
        again = False
        while True:
            try:
                with self._interruption.allow_signals():
                    return read()
            except (TrainerError, OSError):
                availability = self._run.probe_checkpoint(checkpoint)
                if availability == "removed":
                    raise _GoneError from None
                if availability == "available" and again:
                    raise
            again = availability == "available"
            if availability == "unreachable":
                self._log_once(f"{self._output}: unreachable, waiting")
                self._interruption.sleep(self._pause)

    def _build_record(
        self,
        checkpoint: Checkpoint,
        outcomes: dict[str, Outcome | str],
        began: float,
        reason: str | None = None,
    ) -> Record:
        first = outcomes.get(self._tasks[0].name)
        rated = first if isinstance(first, Outcome) else None
        return {
            "schema": SCHEMA,
            "checkpoint": checkpoint.path.name,
            "step": checkpoint.step,
            "digest": checkpoint.digest,
            "state": "scored" if reason is None else "skipped",
            "reason": reason,
            "runner": self._options.name,
            "time": round(time.time(), 3),
            "seconds": round(time.monotonic() - began, 3),
            "rated_by": f"{self._tasks[0].name}/{rated.rated_by}" if rated else None,
            "rating": rated.rating if rated else None,
            "tasks": {
                name: {"error": outcome} if isinstance(outcome, str) else outcome.as_json()
                for name, outcome in outcomes.items()
            },
        }

    def _deliver(self, claim: Claim, record: Record) -> None:
        name = record["checkpoint"]
        while True:
            try:
                delivered = claim.deliver(record)
                break
            except OSError as error:
                self._log_once(f"{name}: result not written: {error.strerror or error}; waiting")
                self._interruption.sleep(self._pause)
        if not delivered:
            logger.warning("%s: another runner has taken it over, this result is discarded", name)
            return
        logger.info("%s: %s", name, _describe_record(record))
        try:
            self._publish({record["digest"]: record})
        except OSError as error:  # the next check of any runner repeats it
            self._log_once(f"{name}: not listed yet: {error.strerror or error}")

    def _publish(self, results: Mapping[str, Record]) -> None:
        """Add the results that are not listed yet, this runner's or those of a lost one."""
        for digest, record in results.items():
            if digest in self._published:
                continue
            with self._interruption.allow_signals():  # it may wait for a lock
                self._results.publish(record)
            self._published.add(digest)
            self._rated_by = record["rated_by"] or self._rated_by
        if self._rated_by is not None:
            self._results.point_to_best(self._run.store, self._rated_by)
            self._rated_by = None

    def _log_once(self, message: str) -> None:
        """Log once what the runner waits for."""
        if message != self._last_message:
            logger.info("%s", message)
            self._last_message = message


def _describe_record(record: Record) -> str:
    """Return a line with a record's figures, or why there are none."""
    parts = [
        f"{task}/{name} {value:.4f}"
        for task, outcome in record["tasks"].items()
        for name, value in outcome.get("figures", {}).items()
    ]
    return ", ".join(parts) or record["reason"] or "no figures"
