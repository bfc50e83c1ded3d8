"""Proofs that come late or from a worker that is back; `test_proofs.py` has the usual ones."""

from typing import Any

import pytest

from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.weight_audit import WeightAudit
from trainer.exchange.protocol.actions import Emit
from trainer.exchange.protocol.messages import WeightsReport
from trainer.system.errors import ProtocolError


class Stand:
    """An audit that asked ranks for their proofs of step 4, due at 10 s, and what it said."""

    def __init__(self, *ranks: int) -> None:
        self.outbox = Outbox()
        self.audit = WeightAudit(self.outbox, {}, 0)
        self.audit.open_request(4, "right", ranks, 10.0)

    def answers(self, rank: int, at: int, digest: str) -> None:
        self.audit.record_report(rank, WeightsReport(step=at - 1, digest=digest))

    def said(self) -> list[dict[str, Any]]:
        return [action.event for action in self.outbox.take_actions() if isinstance(action, Emit)]


def test_an_older_question_stays_open_beside_a_newer_one():
    stand = Stand(0, 1)
    stand.answers(0, 4, "right")
    stand.audit.open_request(9, "newer", (0, 1), 20.0)
    stand.answers(0, 9, "newer")
    assert stand.said() == []
    assert stand.audit.find_late(10.5) == {1: 4}, (
        "a newer question gives no more time for the older"
    )
    with pytest.raises(ProtocolError, match="after step 4"):
        stand.answers(1, 4, "wrong")  # however late it comes, it shows


def test_answers_complete_the_questions_one_by_one():
    stand = Stand(0, 1)
    stand.audit.open_request(9, "newer", (0, 1), 20.0)
    for at, digest in ((4, "right"), (9, "newer")):
        for rank in (0, 1):
            stand.answers(rank, at, digest)
    assert [event["at_step"] for event in stand.said()] == [4, 9]
    stand.audit.open_request(12, "newest", (0,), 30.0)
    stand.answers(1, 4, "whatever")  # a closed question is of no interest any more


def test_who_comes_back_has_proved_the_state_that_it_took():
    stand = Stand(0, 1)
    stand.answers(0, 4, "right")
    assert stand.audit.find_late(10.1) == {1: 4}
    stand.audit.remove_rank(1)
    assert (
        stand.audit.describe_gap(4) == "rank 1 did not prove that it holds the state after step 4"
    )
    stand.audit.add_rank(1, 4, 99.0)
    assert stand.audit.describe_gap(4) == ""


def test_who_takes_an_older_state_in_owes_the_proofs_since():
    """It was sent the commits that came meanwhile, and applies them first of all."""
    stand = Stand(0)
    stand.answers(0, 4, "right")
    stand.audit.add_rank(1, 3, 12.0)
    assert (
        stand.audit.describe_gap(4) == "rank 1 did not prove that it holds the state after step 4"
    )
    assert stand.audit.find_late(12.1) == {1: 4}
