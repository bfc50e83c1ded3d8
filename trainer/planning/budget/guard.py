"""Decide when a run must stop. Pure: callers pass the time, and no clock is read.

At any moment the run must be able to reach its next checkpoint, and end cleanly there, within the
ceiling. If it cannot, it saves and stops now, since the work until then would be lost and paid for
twice.
"""

from __future__ import annotations

from collections import deque

from trainer.config.budget import BudgetConfig
from trainer.planning.budget.accrual import Accrual
from trainer.planning.cost import money_text

STOPPING = 30.0
"""Seconds that a clean end is expected to take: the step under way (10 s), and the save."""
STEP_PATIENCE = 10.0
"""Part of these seconds that a stop waits for the step in progress."""
_STEPS = 50
"""Steps whose mean time is that of the next ones."""


class BudgetGuard:
    """Watches one attempt of a run; times are monotonic seconds."""

    def __init__(
        self,
        budget: BudgetConfig,
        accrual: Accrual,
        *,
        before: float = 0.0,
        every: int = 0,
        total_steps: int = 0,
        idle_since: float,
        stopping: float = STOPPING,
    ) -> None:
        """Watch a run.

        Args:
            before: money that earlier attempts cost.
            every: steps between checkpoints; 0: none are made, as of a command.
            idle_since: when the last step was completed, of an earlier attempt too.
            stopping: seconds that a clean end may take.
        """
        self._budget = budget
        self._accrual = accrual
        self._before = before
        self._every = every
        self._total = total_steps
        self._progress_at = idle_since
        self._stopping = stopping
        self._step = 0
        self._done_at: deque[float] = deque(maxlen=_STEPS + 1)

    @property
    def spent(self) -> float:
        """Money that the run has cost, all attempts together."""
        return self._before + self._accrual.money

    def record_resumption(self, step: int) -> None:
        """Note the step at which this attempt begins."""
        self._step = step

    def set_total_steps(self, total_steps: int) -> None:
        """Note the steps of the run, after the last of which there is a checkpoint."""
        self._total = total_steps

    def record_step(self, step: int, now: float) -> None:
        """Note a completed step."""
        self._step = step
        self._done_at.append(now)
        self._progress_at = now

    def record_progress(self, now: float) -> None:
        """Note something else that was completed: a validation, or a checkpoint."""
        self._progress_at = now

    def record_save(self, seconds: float) -> None:
        """Note the seconds of a save: with the longest of them a clean end takes longer."""
        self._stopping = max(self._stopping, STEP_PATIENCE + seconds)

    def project_cost(self, now: float) -> float:
        """Return what the run will have cost once its next checkpoint is saved and it has ended."""
        seconds = self._until_checkpoint(now) + self._stopping
        return self.spent + self._accrual.an_hour * seconds / 3600

    @property
    def next_checkpoint(self) -> int:
        """The step after which the next checkpoint is saved."""
        if not self._every:
            return self._step
        return min((self._step // self._every + 1) * self._every, max(self._total, self._step))

    def check_budget(self, now: float) -> str | None:
        """Return why the run must stop now; None while it need not."""
        limit = self._budget.idle_stop
        if limit is not None and now - self._progress_at >= limit:
            return f"budget.idle_stop: no step was completed for {now - self._progress_at:.0f} s"
        ceiling, projected = self._budget.ceiling, self.project_cost(now)
        if ceiling is None or projected <= ceiling:
            return None
        unit = self._budget.currency
        of = f"{money_text(self.spent)} of {money_text(ceiling)} {unit}"
        spent, total = f"budget.ceiling: {of} are spent, and", money_text(projected)
        if not self._every:
            return f"{spent} a clean end would make it {total}"
        what = f"the checkpoint of step {self.next_checkpoint}" if self._done_at else "an end now"
        return f"{spent} {what} would make it {total}; resume with a higher budget.ceiling"

    def _until_checkpoint(self, now: float) -> float:
        """Return the seconds to the next checkpoint; 0 until two steps show how long one takes."""
        if len(self._done_at) < 2:
            return 0.0
        first, last = self._done_at[0], self._done_at[-1]
        each = (last - first) / (len(self._done_at) - 1)
        return max(0.0, (self.next_checkpoint - self._step) * each - (now - last))
