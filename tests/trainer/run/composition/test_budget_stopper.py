"""The guard of a process that waits and computes in one thread."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import wait_for
from trainer.config.budget import load_budget
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.planning.budget.ledger import SpendLedger
from trainer.run.composition.student_role import BudgetStopper
from trainer.system.process.stop_signals import StopRequest


def test_it_asks_to_stop_while_the_process_waits(tmp_path: Path) -> None:
    hosts = [{"name": "rack", "price_hour": 3600.0}, {"name": "old", "price_hour": 3600.0}]
    budget = load_budget({"ceiling": 60.2, "currency": "EUR", "hosts": hosts}, "test")
    watch, stop = BudgetWatch(budget, "run", tmp_path / "spend.jsonl"), StopRequest()
    stopper = BudgetStopper(watch, stop)
    with stopper.at_work():  # 30 s of an end in order at 2 EUR a second are kept back
        wait_for(lambda: bool(stop), "the stop")
    assert stopper.ending is not None
    assert stop.reason == stopper.ending
    assert stop.reason.startswith("budget.ceiling: ")
    watch.close()
    watch.close()
    records = SpendLedger(tmp_path / "spend.jsonl").read_records()
    assert [(record.host, record.is_final) for record in records] == [
        ("rack", False),
        ("old", False),
        ("rack", True),
        ("old", True),
    ]


def test_without_a_budget_nothing_is_asked() -> None:
    stop = StopRequest()
    with BudgetStopper(None, stop).at_work():
        pass
    assert not stop
