"""Seconds of a distillation, against sums by hand."""

from dataclasses import replace

import pytest

from trainer.planning.device_models import DEVICES
from trainer.planning.distillation import Scoring, distillation_seconds, scoring_seconds
from trainer.planning.shapes import NAMED
from trainer.planning.time import forward_flops_per_token

SHAPE = NAMED["7b"]
CORPUS = Scoring(shape=SHAPE, tokens=8e6, windows=8000, shards=8, missing=8)
A100 = DEVICES["A100-80G"]
ALONE = 8e6 * forward_flops_per_token(SHAPE, 1000).value / (312e12 * 0.4)


def test_a_forward_is_a_third_of_a_training_step_of_all_weights() -> None:
    """72 B s L h^2 of arXiv 2104.04473 is three forwards; its 24 here for a GPT."""
    shape, length = NAMED["gpt3-175b"], 2048
    inside = 1 + length / (6 * shape.hidden) + shape.vocab / (12 * shape.layers * shape.hidden)
    by_hand = 24 * shape.layers * shape.hidden**2 * inside
    assert forward_flops_per_token(shape, length).value == pytest.approx(by_hand, rel=1e-9)


def test_teachers_take_whole_shards() -> None:
    assert scoring_seconds(CORPUS, [A100]) == pytest.approx(ALONE)
    assert scoring_seconds(CORPUS, [A100] * 2) == pytest.approx(ALONE / 2)
    assert scoring_seconds(CORPUS, [A100] * 3) == pytest.approx(ALONE * 3 / 8)
    assert scoring_seconds(CORPUS, [A100] * 99) == pytest.approx(ALONE / 8)
    one = replace(CORPUS, shards=1, missing=1)
    assert scoring_seconds(one, [A100] * 2) == pytest.approx(ALONE)


def test_the_slowest_teacher_is_waited_for() -> None:
    l4 = DEVICES["L4"]
    assert scoring_seconds(CORPUS, [A100, l4]) == pytest.approx(ALONE / 2 * 312 / 121)


def test_what_is_scored_or_never_read_takes_no_time() -> None:
    assert scoring_seconds(replace(CORPUS, missing=2), [A100]) == pytest.approx(ALONE / 4)
    assert scoring_seconds(replace(CORPUS, missing=0), [A100]) == 0
    assert scoring_seconds(CORPUS, [A100], seen=0.5) == pytest.approx(ALONE / 2)
    assert scoring_seconds(replace(CORPUS, missing=4), [A100], seen=0.5) == 0


def test_products_in_fp32_have_their_own_speed() -> None:
    wide = scoring_seconds(CORPUS, [A100], wide=True)
    assert wide == pytest.approx(ALONE * 312 / 19.5)
    unknown = replace(A100, flops=None, fp32=None)
    assert scoring_seconds(CORPUS, [A100, unknown]) is None
    cpu = replace(unknown, name="CPU, 4 cores", flops=4e9)
    assert scoring_seconds(CORPUS, [cpu]) == pytest.approx(ALONE * 312e12 / 4e9)


@pytest.mark.parametrize(
    ("scoring", "learning", "first", "seconds"),
    [
        (10, 100, 1.0, 100),  # one epoch, the student is slower
        (100, 10, 1.0, 100),  # one epoch, the teacher is slower
        (100, 40, 0.25, 130),  # four epochs: the first waits, three do not
        (0, 40, 0.0, 40),  # resumed in a later epoch
    ],
)
def test_the_slower_one_decides_the_first_epoch(
    scoring: float, learning: float, first: float, seconds: float
) -> None:
    assert distillation_seconds(scoring, learning, first) == seconds
