"""When a run must stop, in virtual time."""

from __future__ import annotations

import pytest

from trainer.config.budget import BudgetConfig, HostRate
from trainer.planning.budget.accrual import Accrual
from trainer.planning.budget.guard import STOPPING, BudgetGuard

RATE = HostRate(name="rack", price_hour=3600.0)  # one a second


class Attempt:
    """An attempt at one step in ten seconds, with a checkpoint every 10 of 100 steps."""

    def __init__(self, ceiling: float | None, before: float = 0.0, **budget: object) -> None:
        config = BudgetConfig.model_validate(
            {"ceiling": ceiling, "currency": "USD", "hosts": [RATE.model_dump()], **budget}
        )
        self.now = 0.0
        self.accrual = Accrual(config.hosts, 0.0)
        self.guard = BudgetGuard(
            config, self.accrual, before=before, every=10, total_steps=100, idle_since=0.0
        )

    def run(self, first: int = 1, last: int = 100, each: float = 10.0) -> tuple[int, str] | None:
        """Return the step after which the guard ends the run, and why."""
        for step in range(first, last + 1):
            self.now += each
            self.accrual.advance(self.now, {})
            self.guard.record_step(step, self.now)
            if ending := self.guard.check_budget(self.now):
                return step, ending
        return None


def test_it_stops_where_the_next_checkpoint_would_breach_the_ceiling() -> None:
    attempt = Attempt(ceiling=350.0)
    ended = attempt.run()
    # At step 30, 300 are spent: the checkpoint of step 40 would make it 400.
    assert ended is not None
    step, reason = ended
    assert step == 30
    assert attempt.guard.spent == 300.0
    assert reason == (
        "budget.ceiling: 300.00 of 350.00 USD are spent, and the checkpoint of step 40 would make"
        " it 430.00; resume with a higher budget.ceiling"
    )


def test_a_ceiling_that_is_just_enough_lets_it_end() -> None:
    assert Attempt(ceiling=1000.0 + STOPPING).run() is None
    assert Attempt(ceiling=1000.0 + STOPPING - 0.1).run() is not None


@pytest.mark.parametrize("ceiling", [100.0, 350.0, 777.0])
def test_the_ceiling_is_never_breached(ceiling: float) -> None:
    attempt = Attempt(ceiling=ceiling)
    attempt.run()
    assert attempt.guard.spent + STOPPING <= ceiling


def test_steps_that_become_slower_stop_it_between_checkpoints() -> None:
    attempt = Attempt(ceiling=450.0)
    assert attempt.run(last=32) is None
    ended = attempt.run(first=33, each=40.0)
    assert ended is not None
    assert ended[0] < 40
    assert attempt.guard.spent <= 450.0


def test_a_slow_disk_is_given_its_time() -> None:
    attempt = Attempt(ceiling=1000.0 + STOPPING)
    attempt.guard.record_save(200.0)
    ended = attempt.run()
    assert ended is not None
    assert attempt.guard.spent + 210.0 <= 1000.0 + STOPPING


def test_time_alone_breaches_it_too() -> None:
    """No step is ever completed: workers that never join cost as well."""
    attempt = Attempt(ceiling=100.0)
    attempt.accrual.advance(69.0, {})
    assert attempt.guard.check_budget(69.0) is None
    attempt.accrual.advance(71.0, {})
    assert attempt.guard.check_budget(71.0) is not None


def test_idle_stop() -> None:
    attempt = Attempt(ceiling=None, idle_stop="30m")
    assert attempt.run(last=20) is None
    quiet = attempt.now
    assert attempt.guard.check_budget(quiet + 1799) is None
    ending = attempt.guard.check_budget(quiet + 1800)
    assert ending is not None
    assert ending == "budget.idle_stop: no step was completed for 1800 s"
    attempt.guard.record_progress(quiet + 1790)
    assert attempt.guard.check_budget(quiet + 1800) is None
