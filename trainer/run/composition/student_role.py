"""The role of a student, from waiting for a teacher to the last score of its checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.resume import checkpoint_path
from trainer.config.capabilities import check_capability
from trainer.config.run import RunConfig
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.student.inputs import FreshStudent, await_description, check_ahead
from trainer.evaluate.claims import Claims, ClaimState
from trainer.evaluate.results import EVALUATIONS
from trainer.evaluate.watcher import WatchedRun
from trainer.model.output_folder import check_output
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.run.composition import run as build
from trainer.run.composition.record import refuse_lost_checkpoints
from trainer.run.composition.roles import Placement, guard_run, open_replica
from trainer.run.inputs import read_student_inputs
from trainer.system.errors import BudgetStopError, InUseError, TrainerError
from trainer.system.process.heartbeat import HeartbeatMonitor
from trainer.system.process.stop_signals import StopRequest
from trainer.system.storage import lease
from trainer.tracking.status import StatusFile, first_status, say_last

if TYPE_CHECKING:
    from trainer.distill.student.loop import Student

LOOK_EVERY = 1.0
"""Seconds between two looks at the budget."""
PATIENCE = 120.0
"""Seconds without a sign of a living eval runner after which the run stops waiting for it."""
_LOOK = 0.5
"""Seconds between two looks at the scores."""

log = logging.getLogger(__name__)


def run_student(
    config: RunConfig,
    run_id: str,
    place: Placement,
    *,
    compiled: bool,
    teacher_timeout: float,
    stop: StopRequest,
    fresh: FreshStudent | None = None,
    scored: bool = False,
    notify: Sequence[str] = (),
) -> int:
    """Train a student until its run is over, and return the exit code.

    A budget counts from the first moment, when its teachers may still be starting.

    Args:
        config: `data.train` is a folder of logits, which a teacher may still be writing.
        compiled, teacher_timeout: see `build.make_student`.
        fresh: makes the model folder, once the logits are known.
        scored: end once an eval runner has scored the checkpoints; for a budget, which counts it.
        notify: the command of this start that gets the run's events.

    Raises:
        InputError: model, folder or settings cannot be used together.
        RefusedError: the student's tokenizer is not the one of the logits.
        UnreachableError: the teacher was lost, or never started.
        NonFiniteError: NaN or Inf halted the run.
        StorageError: the folder, or the last checkpoint, cannot be read or written.
        BudgetStopError: the guard stopped the run before its first step.
        InUseError: another process writes the output folder or the checkpoints.
    """
    check_capability(config, "student")
    output, folder = Path(config.output), LogitsFolder(Path(config.data.train))
    check_output(output)
    refuse_lost_checkpoints(config)
    with ExitStack() as at_end:
        held = lease.acquire_lease(output, run_id, beside=checkpoint_path(config))
        at_end.callback(held.release)
        with _failure_in_status(config, run_id):
            steps = config.training.max_steps or 0
            guards = at_end.enter_context(guard_run(config, run_id, notify, total_steps=steps))
            watch = guards.budget
        stopper = BudgetStopper(watch, stop)
        with stopper.at_work():
            with _failure_in_status(config, run_id) as on_wait:
                validation = check_ahead(config, fresh)
                described = await_description(folder, teacher_timeout, stop, on_wait)
                if stopper.ending is not None:  # a large model would cost more than was kept back
                    raise BudgetStopError(stopper.ending)
                if not described:
                    return 0
                if fresh is not None:
                    fresh.write_model_folder(config, folder.description)
                inputs = read_student_inputs(config, run_id, folder, validation, log.info)
                if watch is not None:
                    watch.set_total_steps(inputs.plan.total_steps)
                student = build.make_student(
                    inputs,
                    partial(open_replica, inputs, place, moments=True),
                    lease=held,
                    stop=stop,
                    teacher_timeout=teacher_timeout,
                    compiled=compiled,
                    guards=guards,
                )
            with student.recorder.closed_on_failure():
                reason = student.run()
                done = student.is_done
                if done and scored:
                    done, reason = _await_scores(config, student, stopper)
        spent = stopper.ending is not None and not done
        return student.recorder.close(BudgetStopError.exit_code if spent else 0, reason)


def _await_scores(config: RunConfig, student: Student, stopper: BudgetStopper) -> tuple[bool, str]:
    """Wait for an eval runner; return whether the run is done, and how it ended."""
    student.recorder.flush()
    student.recorder.emit({"event": "waiting", "reason": "for the scores of its checkpoints"})
    watched = Path(config.checkpoint.folder or config.output)
    progressed = stopper.watch.record_progress if stopper.watch else lambda: None
    await_scores(watched, lambda: bool(stopper.stop), progressed)
    if stopper.stop:
        return False, stopper.stop.reason
    return True, "all steps are done"


@contextmanager
def _failure_in_status(config: RunConfig, run_id: str) -> Iterator[Callable[[str], None]]:
    """Write an error to status.json while there is no recorder; yield what writes a wait."""
    status, status_file = first_status(run_id, 0, 1), StatusFile(Path(config.output))

    def on_wait(message: str) -> None:
        log.info("waiting %s", message)
        status["reason"] = message
        status_file.write_if_due(status)

    try:
        yield on_wait
    except TrainerError as error:
        state = "stopped" if isinstance(error, BudgetStopError) else "failed"
        status.update(state=state, reason=str(error), exit_code=error.exit_code)
        # Checkpoints that another process writes are left alone.
        checkpoints = None if isinstance(error, InUseError) else config.checkpoint.folder
        for folder in filter(None, (config.output, checkpoints)):
            say_last(Path(folder), status)
        raise


class BudgetStopper:
    """Asks a process to stop when its budget requires it, whatever the process is doing."""

    def __init__(self, watch: BudgetWatch | None, stop: StopRequest) -> None:
        self.watch, self.stop = watch, stop
        self.ending: str | None = None
        """Why it was asked to."""
        self._over = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Look now, and about once a second in the block; without a budget do nothing."""
        self._check_budget()
        thread = threading.Thread(target=self._watch_budget, name="budget", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch_budget(self) -> None:
        while self.watch is not None and self.ending is None and not self._over.wait(LOOK_EVERY):
            self._check_budget()

    def _check_budget(self) -> None:
        self.ending = self.watch and self.watch.ending
        if self.ending is not None:
            self.stop.request(self.ending)


def await_scores(
    output: Path,
    over: Callable[[], bool],
    on_progress: Callable[[], None],
    patience: float = PATIENCE,
) -> None:
    """Return once each checkpoint has a result, `over` says so, or no runner lives.

    Args:
        output: the folder that runners watch.
        on_progress: called after each result.
    """
    run, claims = WatchedRun(output), Claims(output / EVALUATIONS / "claims", "", patience)
    states: dict[str, ClaimState] = {}
    silence = HeartbeatMonitor()
    while not over():
        with suppress(OSError):  # an unreachable share: it may return
            found = claims.read_states()
            if _finished_digests(found) != _finished_digests(states):
                on_progress()
            states = found
            if {checkpoint.digest for checkpoint in run.list_checkpoints()} <= _finished_digests(
                states
            ):
                return
        if silence.observe(states) >= patience:
            log.warning("%s: no eval runner is running; not waiting for scores", output)
            return
        time.sleep(_LOOK)


def _finished_digests(states: dict[str, ClaimState]) -> set[str]:
    return {digest for digest, state in states.items() if state.record is not None}
