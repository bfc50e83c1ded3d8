"""The proof that all hold the same weights: asked for, complete once, wrong, late, or missing."""

from typing import Any

import pytest

from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.weight_audit import WeightAudit
from trainer.exchange.protocol.actions import Emit
from trainer.exchange.protocol.messages import WeightsReport
from trainer.system.errors import ProtocolError


class Stand:
    """An audit of a run that began at step 0, and what it said."""

    def __init__(self, *ranks: int, at: int = 4) -> None:
        self.outbox = Outbox()
        self.diverged: dict[int, int] = {}
        self.audit = WeightAudit(self.outbox, self.diverged, 0)
        if ranks:
            self.audit.ask(at, "right", ranks, 10.0)

    def answers(self, rank: int, at: int, digest: str) -> None:
        self.audit.answer(rank, WeightsReport(step=at - 1, digest=digest))

    def said(self) -> list[dict[str, Any]]:
        return [action.event for action in self.outbox.take() if isinstance(action, Emit)]


def test_verified_once_by_the_last_one():
    stand = Stand(0, 1)
    assert stand.audit.pending
    stand.answers(0, 4, "right")
    assert stand.said() == []
    stand.answers(1, 4, "right")
    assert stand.said() == [{"event": "verified", "at": 4, "digest": "right", "ranks": [0, 1]}]
    assert not stand.audit.pending
    assert stand.audit.gap(4) == ""
    stand.answers(2, 4, "right")
    assert stand.said() == [], "it is said once"


def test_who_left_is_not_waited_for():
    stand = Stand(0, 1)
    stand.answers(0, 4, "right")
    stand.audit.lost(1)
    assert [event["ranks"] for event in stand.said()] == [[0]]
    assert stand.audit.gap(4) == ""
    stand.audit.lost(0)
    assert stand.said() == []


def test_nobody_left_proves_nothing():
    stand = Stand(0, 1)
    stand.audit.lost(0)
    stand.audit.lost(1)
    assert not stand.audit.pending
    assert stand.said() == []
    assert stand.audit.gap(4) == "no worker proved that it holds the state after step 4"


def test_other_weights():
    stand = Stand(0, 1)
    stand.answers(1, 4, "right")
    with pytest.raises(ProtocolError, match="its weights differ after step 4"):
        stand.answers(0, 4, "wrong")
    assert stand.said()[-1] == {"event": "diverged", "rank": 0, "at": 4, "digest": "wrong"}
    assert stand.diverged == {0: 1}
    stand.audit.lost(0)
    assert stand.audit.gap(4) == "rank 0 did not prove that it holds the state after step 4"
    with pytest.raises(ProtocolError, match="after step 5, which was not asked for"):
        stand.answers(1, 5, "right")


def test_an_older_question_stays_open_beside_a_newer_one():
    stand = Stand(0, 1)
    stand.answers(0, 4, "right")
    stand.audit.ask(9, "newer", (0, 1), 20.0)
    stand.answers(0, 9, "newer")
    assert stand.said() == []
    assert stand.audit.late(10.5) == {1: 4}, "a newer question gives no more time for the older"
    with pytest.raises(ProtocolError, match="after step 4"):
        stand.answers(1, 4, "wrong")  # however late it comes, it shows


def test_answers_complete_the_questions_one_by_one():
    stand = Stand(0, 1)
    stand.audit.ask(9, "newer", (0, 1), 20.0)
    for at, digest in ((4, "right"), (9, "newer")):
        for rank in (0, 1):
            stand.answers(rank, at, digest)
    assert [event["at"] for event in stand.said()] == [4, 9]
    stand.audit.ask(12, "newest", (0,), 30.0)
    stand.answers(1, 4, "whatever")  # a closed question is of no interest any more


def test_a_proof_that_does_not_come():
    stand = Stand(0, 1)
    stand.answers(0, 4, "right")
    assert stand.audit.late(10.0) == {}
    assert stand.audit.late(10.1) == {1: 4}
    stand.audit.lost(1)
    assert stand.audit.gap(4) == "rank 1 did not prove that it holds the state after step 4"
    stand.audit.joined(1, 4, 99.0)
    assert stand.audit.gap(4) == "", "it came back, and proved it by the state that it took"


def test_its_own_sleep_moves_the_deadlines():
    stand = Stand(0)
    stand.audit.postpone(5.0)
    assert stand.audit.late(15.0) == {}
    assert stand.audit.late(15.1) == {0: 4}


def test_who_joins_with_the_state_has_proved_it():
    stand = Stand()
    assert not stand.audit.pending
    assert stand.audit.gap(0) == "no worker proved that it holds the state after step 0"
    stand.audit.joined(0, 0, 5.0)
    assert stand.audit.gap(0) == ""
    assert stand.said() == [], "the event is for what was asked"


def test_who_takes_an_older_state_in_owes_the_proofs_since():
    """It was sent the commits that came meanwhile, and applies them first of all."""
    stand = Stand(0)
    stand.answers(0, 4, "right")
    stand.said()
    stand.audit.joined(1, 3, 12.0)
    assert stand.audit.gap(4) == "rank 1 did not prove that it holds the state after step 4"
    assert stand.audit.late(12.1) == {1: 4}


def test_before_anything_was_asked_no_report_is_right():
    with pytest.raises(ProtocolError):
        Stand().answers(0, 1, "x")
