"""The proof that all hold the same weights: asked for, complete once, or diverged."""

import pytest

from trainer.errors import ProtocolError
from trainer.exchange.audit import Audit


def asked(step: int = 4) -> Audit:
    audit = Audit()
    audit.expect(step, "right")
    return audit


def test_verified_once_by_the_last_one():
    audit = asked()
    assert audit.pending
    assert audit.compare(0, 4, "right", {0, 1}) == "pending"
    assert audit.compare(1, 4, "right", {0, 1}) == "verified"
    assert not audit.pending
    assert audit.confirmed == [0, 1]
    assert audit.compare(2, 4, "right", {0, 1, 2}) == "pending", "it is said once"


def test_who_left_is_not_waited_for():
    audit = asked()
    assert audit.compare(0, 4, "right", {0, 1}) == "pending"
    assert audit.settled({0})
    assert not audit.settled({0})


def test_nobody_left_proves_nothing():
    assert not asked().settled(set())


def test_other_weights_and_old_reports():
    audit = asked()
    assert audit.compare(0, 4, "wrong", {0}) == "diverged"
    assert audit.compare(0, 3, "wrong", {0}) == "pending", "the newer step will say"
    assert audit.pending
    with pytest.raises(ProtocolError, match="step 5, which was not asked for"):
        audit.compare(0, 5, "right", {0})


def test_a_new_question_forgets_the_old_answers():
    audit = asked()
    audit.compare(0, 4, "right", {0})
    audit.expect(9, "newer")
    assert audit.pending
    assert audit.confirmed == []
    assert audit.compare(0, 9, "right", {0}) == "diverged"


def test_before_anything_was_asked_nothing_is_pending():
    audit = Audit()
    assert not audit.pending
    with pytest.raises(ProtocolError):
        audit.compare(0, 0, "x", {0})
