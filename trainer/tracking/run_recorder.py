"""The record of a run: events become metrics, status and a view; saves become checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.reader import Resumed
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.config.run import RunConfig
from trainer.exchange.protocol.actions import Save, Step
from trainer.exchange.protocol.members import Job
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.early_stopping import EarlyStopping, ValidationHistory
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.planning.resident_layers import find_residents
from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.errors import (
    RESTARTED,
    BudgetStopError,
    NonFiniteError,
    StorageError,
    TrainerError,
    UnprovedError,
)
from trainer.system.process.child import NO_GPU, SAVING_VARIABLE
from trainer.system.process.priority import reset_thread_priority
from trainer.system.storage.lease import Lease
from trainer.tracking.card import make_card, shorten_text
from trainer.tracking.metrics import MetricsLog
from trainer.tracking.notifier import Notifier
from trainer.tracking.progress import open_view, show_lines
from trainer.tracking.status import MOVING, StatusFile, WorkerStatus, first_status
from trainer.tracking.trackers.table import open_trackers

log = logging.getLogger(__name__)

_QUIET = ("verified", "listening")
"""Events that the view does not show."""


def make_progress(
    step: int, generation: int, config: RunConfig, job: Job, plan: StepPlan
) -> RunProgress:
    """Return what a checkpoint after `step` updates says of the run."""
    at = plan.find_samples(step)
    return RunProgress(
        run_id=job.run_id,
        step=step,
        epoch=at.epoch,
        epoch_samples=at.start,
        generation=generation,
        seed=config.training.seed,
        config=config.model_dump(mode="json"),
        data_digest=job.data_digest,
        model_digest=job.model_digest,
        base_digest=job.base_digest,
    )


class RunRecorder:
    """Writes below the run's output folder, concurrently with training.

    A slow disk or one failed save never stops the run; a second failure in a row does.

    Args:
        lease: of the output folder; released at the end, with the store's.
    """

    def __init__(
        self,
        output: Path,
        store: CheckpointStore,
        config: RunConfig,
        job: Job,
        plan: StepPlan,
        expect_workers: int,
        lease: Lease | None = None,
        budget: BudgetWatch | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._store = store
        self._budget = budget
        self._lease_of_output = lease
        self._config = config
        self._job = job
        self._plan = plan
        self._metrics = MetricsLog(output, open_trackers(config, job.run_id, output))
        self._status_file = StatusFile(output)
        self._view = open_view()
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=reset_thread_priority)
        self._waiting: list[Save] = []
        self._lock = threading.Lock()
        self._failed_save: str | None = None
        self._failure: StorageError | None = None
        mark = os.environ.get(SAVING_VARIABLE)
        self._mark = Path(mark) if mark else None
        self.early = EarlyStopping(config.training.early_stopping_patience)
        """Decides on the validations that are logged here."""
        self._workers: dict[int, WorkerStatus] = {}
        self._status = first_status(job.run_id, plan.total_steps, expect_workers, config.rate_unit)
        self._notifier = notifier or Notifier((), job.run_id, "")
        self._notifier.status = self._status
        self._notifier.record_progress()
        self._halted_by_nan = False
        self._publish_status()

    def resume(self, resumed: Resumed | None) -> None:
        """Log where the run resumes, which makes earlier lines of later steps void.

        A run that ended before its first checkpoint restarts at step 0.
        """
        if resumed:
            self.early.counted = resumed.progress.early_stopping or ValidationHistory()
            step, path = resumed.progress.step, str(resumed.path)
            self.emit({"event": "resumed", "step": step, "path": path})
            if line := self._new_schedule(resumed.progress):
                log.info("%s", line)
        elif self._metrics.has_steps():
            self.emit({"event": "resumed", "step": 0, "reason": "there was no checkpoint yet"})

    def _new_schedule(self, progress: RunProgress) -> str | None:
        """Return what a run that became longer or shorter does to its learning rate."""
        before, plan = RunConfig.model_validate(progress.config), self._plan
        old = replace(plan, epochs=before.training.epochs, max_steps=before.training.max_steps)
        if old.total_inner == plan.total_inner or not 0 < progress.step < plan.total_steps:
            return None
        last, following = (
            plan.find_inner_steps(progress.step - 1)[-1],
            plan.find_inner_steps(progress.step)[0],
        )
        if last >= old.total_inner:
            return None
        rates = [
            compute_learning_rate(step, total, self._config.optimizer)
            for step, total in ((last, old.total_inner), (following, plan.total_inner))
        ]
        change = "extended" if plan.total_inner > old.total_inner else "shortened"
        return (
            f"the run is {change} from {old.total_inner} to {plan.total_inner} steps: its "
            f"schedule spans all of them, so the learning rate goes from {rates[0]:.1e} to"
            f" {rates[1]:.1e} at step {progress.step + 1}"
        )

    def emit(self, event: dict[str, Any]) -> None:
        """Log an event of the run, other than a step."""
        self._check_lease()
        details = dict(event)
        kind = details.pop("event")
        if "generation" in details:
            self._status["generation"] = details["generation"]
        if kind == "validation":
            self._record_validation(details)
        elif kind == "answers":
            for answer in details["answers"]:
                self._metrics.record_answer(details["at_step"], **answer)
                asked, text = (
                    shorten_text(sanitize_text(answer[key]), 200) for key in ("prompt", "text")
                )
                log.info("step %d: %s -> %s", details["at_step"], asked, text)
        else:
            self._on_event(kind, details)
        self._publish_status()

    def log_step(self, event: Step) -> None:
        """Log a step that was committed."""
        self._check_lease()
        if self._budget:
            self._budget.record_step(event.step, event.watts)
        self._notifier.record_progress(event.seconds)
        self._metrics.record_step(event)
        for name in (*MOVING, "generation", "codec", "inner_steps"):
            self._status[name] = getattr(event, name)
        self._begin_running()
        for rank, worker in self._workers.items():
            worker["samples"] = event.worker_samples.get(rank, 0)
            worker["tokens_per_second"] = event.worker_tokens_per_second.get(rank)
            worker["step_seconds"] = event.seconds
        self._publish_status()

    def save(self, save: Save) -> None:
        """Write a checkpoint concurrently with training.

        If the disk cannot keep up, a newer checkpoint replaces the waiting one, unless that was
        validated: every waiting snapshot keeps three gradients of memory.
        """
        with self._lock:
            for older in [waiting for waiting in self._waiting if waiting.validation is None]:
                self._waiting.remove(older)
                older.snapshot.close()
                log.warning(
                    "the disk is slow: no checkpoint of step %d, a newer one follows",
                    older.snapshot.step,
                )
            self._waiting.append(replace(save, early=self.early.counted))
            self._mark_saving(True)
        self._writer.submit(self._save_next)

    def record_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Record a checkpoint that is complete, and took so long."""
        if self._budget:
            self._budget.record_save(seconds)
        self._notifier.record_progress()
        self._failed_save = None
        self._metrics.record_event("checkpoint", step, path=str(path))
        self._status["checkpoint"] = {"step": step, "path": str(path)}
        self._status["reason"] = None

    def record_failed_save(self, step: int, reason: str) -> None:
        """Record a checkpoint that failed; two in a row are a `failure`."""
        self._record_notify_failure(reason)
        log.error("ALARM: %s", reason)
        self._metrics.record_event("alarm", step, reason=reason)
        self._status["reason"] = reason

    @property
    def failure(self) -> StorageError | None:
        """Why the run cannot go on: two saves in a row have failed."""
        return self._failure

    @property
    def ending(self) -> str | None:
        """Why the run must stop, to hold its budget."""
        return None if self._budget is None else self._budget.ending

    def flush(self) -> None:
        """Wait until every requested save is on the disk, or has failed."""
        self._writer.submit(lambda: None).result()

    def close(self, exit_code: int, reason: str) -> int:
        """Wait for the last checkpoint, record how the run ended, and return the exit code."""
        self._writer.shutdown(wait=True)
        self._check_lease()
        saved = (0, UnprovedError.exit_code, BudgetStopError.exit_code)
        if exit_code in saved and self._failed_save:
            exit_code, reason = StorageError.exit_code, self._failed_save
        if exit_code in saved:
            try:
                self._store.write_publication()
            except StorageError as error:  # the checkpoint that it is made of is safe
                log.warning("%s", error)
        if self._budget:
            self._budget.close(ended=exit_code not in RESTARTED)
        early = self.early.stop_reason is not None and reason == self.early.stop_reason
        unfinished = exit_code == 0 and self._status["step"] < self._plan.total_steps and not early
        if unfinished or exit_code == BudgetStopError.exit_code:
            self._status["state"] = "stopped"
            self._metrics.record_event("stopped", self._status["step"], reason=reason)
        else:
            self._status["state"] = "completed" if exit_code == 0 else "failed"
            self._metrics.record_event(
                "finished", self._status["step"], reason=reason, exit_code=exit_code
            )
        self._status["reason"] = reason
        self._status["exit_code"] = exit_code
        spent = exit_code == BudgetStopError.exit_code
        ending = "nan" if self._halted_by_nan else "budget" if spent else self._status["state"]
        self._notifier.notify_end(ending, reason, exit_code)
        for worker in self._workers.values():
            worker["state"] = "lost" if worker["state"] == "lost" else "active"
        stopped = self._status["state"] == "stopped"
        ended = exit_code == 0
        card = make_card(self._config, self._job.run_id, stopped=stopped) if ended else []
        self._status["summary"] = card
        self._publish_status()
        self._notifier.close()
        self._publish_status()
        if self._config.checkpoint.folder is not None:
            # Readers on another host may see the checkpoints alone.
            if self._store.lease:
                self._store.lease.check_held()
            StatusFile(self._store.folder).write_if_due(self._status)
        self._view.close()
        for worker in self._workers.values():
            reason = worker["backend_reason"]
            if reason and not reason.startswith(NO_GPU) and reason != find_residents(reason):
                log.warning(
                    "worker %d computed on %s: %s", worker["rank"], worker["device"], reason
                )
        show_lines(self._status["summary"])
        self._metrics.close(exit_code)
        self._store.release()
        if self._lease_of_output:
            self._lease_of_output.release()
        return exit_code

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Record an error of the block as the end of the run."""
        try:
            yield
        except TrainerError as error:
            if isinstance(error, NonFiniteError):
                self.emit({"event": "halted", "reason": str(error), "non_finite": True})
            self.close(error.exit_code, str(error))
            raise

    def _record_validation(self, details: dict[str, Any]) -> None:
        step = details.pop("at_step")
        if self._budget:
            self._budget.record_progress()
        self._notifier.record_progress()
        self._metrics.record_validation(step, **details)
        self.early.record_validation(step, details["loss"])
        self._status["validation"] = {
            "step": step,
            "loss": details["loss"],
            "accuracy": details.get("accuracy"),
            "mcc": details.get("mcc"),
            "reward_margin": details.get("reward_margin"),
            "reward_accuracy": details.get("reward_accuracy"),
            "figures": details.get("figures", {}),
        }

    def _on_event(self, kind: Any, details: dict[str, Any]) -> None:
        rank = details.get("rank")
        if kind in ("joined", "rejoined"):
            self._workers[details["rank"]] = WorkerStatus(
                rank=details["rank"],
                host=details["host"],
                device=details["device"],
                backend=details["backend"],
                backend_reason=details["backend_reason"],
                state="active",
                samples=0,
                step_seconds=None,
                tokens_per_second=None,
            )
            self._status["workers"] = [self._workers[rank] for rank in sorted(self._workers)]
            if len(self._workers) >= self._status["expect_workers"]:
                self._begin_running()
            if kind == "rejoined":
                self._notifier.notify("rejoined", rank=rank, worker_host=details["host"])
        elif kind in ("lost", "idle", "active") and rank in self._workers:
            if kind == "lost" and self._status["state"] != "stopping":
                host = self._workers[rank]["host"]
                self._notifier.notify("lost", details["reason"], rank=rank, worker_host=host)
            self._workers[rank]["state"] = kind
        elif kind == "resumed":
            self._status["step"] = details["step"]
            self._notifier.notify("resumed", details.get("reason") or f"from {details['path']}")
            if self._budget:
                self._budget.record_resumption(details["step"])
        elif kind == "stopping":
            self._status["state"] = "stopping"
        elif kind == "halted":
            self._halted_by_nan = details.get("non_finite", False)
        elif kind == "waiting":
            self._status["state"], self._status["reason"] = "waiting", details["reason"]
        elif kind == "alarm":
            self._status["reason"] = details["reason"]
        step = details.pop("step", self._status["step"])
        self._metrics.record_event(kind, step, **details)
        if kind not in _QUIET:
            self._view.show_event(kind, step, **details)

    def _save_next(self) -> None:
        """Run in the writer's thread."""
        with self._lock:
            save = self._waiting.pop(0) if self._waiting else None
        if save is None:
            return
        try:
            self._save_checkpoint(save)
        except Exception as error:  # a defect; the writer's futures are never read
            log.exception("the checkpoint of step %d was not saved", save.snapshot.step)
            self._record_notify_failure(
                f"step {save.snapshot.step}: checkpoint not saved: {error!r}"
            )
        with self._lock:
            if not self._waiting:
                self._mark_saving(False)

    def _save_checkpoint(self, save: Save) -> None:
        snapshot, scores = save.snapshot, save.validation
        step = snapshot.step
        metric = scores.get("accuracy", -scores["loss"]) if scores else None
        progress = make_progress(step, save.generation, self._config, self._job, self._plan)
        progress = replace(progress, logits_position=save.stream, early_stopping=save.early)
        began = time.monotonic()
        try:
            path = self._store.save(snapshot, progress, metric)
        except StorageError as error:
            self.record_failed_save(step, str(error))
            return
        self.record_checkpoint(step, path, time.monotonic() - began)

    def _record_notify_failure(self, reason: str) -> None:
        if self._failed_save is not None and self._failure is None:
            self._failure = StorageError(
                f"{reason}; this is the second save in a row that failed: the run is halted, since "
                "nothing after the last checkpoint is safe"
            )
        self._failed_save = reason

    def _mark_saving(self, saving: bool) -> None:
        """Create or remove the mark; failures are ignored."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch() if saving else self._mark.unlink(missing_ok=True)

    def _begin_running(self) -> None:
        if self._status["state"] == "waiting":
            self._status["state"], self._status["reason"] = "running", None

    def _check_lease(self) -> None:
        if self._lease_of_output:
            self._lease_of_output.check_held()

    def _publish_status(self) -> None:
        if self._budget:
            self._status["budget"] = self._budget.status
        self._status["notify_failure"] = self._notifier.failure
        self._status_file.write_if_due(self._status)
        self._view.show_status(self._status)
