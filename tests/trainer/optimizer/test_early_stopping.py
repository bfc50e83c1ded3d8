"""Early stopping counts validations, also over a resume."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from trainer.optimizer.early_stopping import EarlyStopping, ValidationHistory
from trainer.system.untrusted_data import validate_json


def test_a_lower_loss_begins_the_count_again() -> None:
    early = EarlyStopping(2)
    for step, loss in enumerate([3.0, 2.0, 2.0, 1.5, None], start=1):
        early.record_validation(step, loss)
        assert early.stop_reason is None
    early.record_validation(6, 1.5)
    assert early.stop_reason is not None
    assert "no validation loss below 1.5000, of step 4, in 2 validations" in early.stop_reason


def test_a_resumed_run_goes_on_counting() -> None:
    before = EarlyStopping(3)
    for step in (10, 20, 30):
        before.record_validation(step, 1.0)
    kept = validate_json(ValidationHistory, json.dumps(asdict(before.counted)), "run.json")
    after = EarlyStopping(3, kept)
    after.record_validation(30, 1.0)  # the state of step 30 is judged again
    assert after.stop_reason is None
    after.record_validation(40, math.nextafter(1.0, 2.0))
    assert after.stop_reason is not None


def test_without_patience_nothing_ends() -> None:
    early = EarlyStopping(None)
    for step in range(100):
        early.record_validation(step, None)
    assert early.stop_reason is None
