"""Error feedback: nothing is lost but what is still owed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.exchange.policies.feedback import ErrorFeedback
from trainer.exchange.protocol.codecs import make_codec

SIZE = 1470
LOSSY = ["int8", "int4"]


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def sender(name: str) -> ErrorFeedback:
    return ErrorFeedback(make_codec(name), [SIZE])


def sent(feedback: ErrorFeedback, values: np.ndarray, **options: object) -> np.ndarray:
    codec, encoded = feedback.encode(0, values, **options)  # type: ignore[arg-type]
    out = np.empty(SIZE, np.float32)
    codec.decode(encoded, out)
    return out


@settings(max_examples=25)
@given(st.sampled_from(LOSSY), st.integers(1, 6), st.integers(0, 999))
def test_what_was_sent_and_what_is_owed_are_what_came(name: str, steps: int, seed: int) -> None:
    feedback = sender(name)
    came = [draw(seed + step) for step in range(steps)]
    total = np.sum([sent(feedback, values) for values in came], axis=0)
    owed = np.sum(came, axis=0) - total
    assert feedback.norm == pytest.approx(np.linalg.norm(owed), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", LOSSY)
def test_a_flush_sends_all_that_is_owed_as_bf16(name: str) -> None:
    feedback = sender(name)
    came = [draw(1), draw(2), draw(3)]
    total = sent(feedback, came[0]) + sent(feedback, came[1])
    codec, _ = feedback.encode(0, np.zeros(SIZE, np.float32), in_bf16=False)
    assert codec.name == name
    feedback = sender(name)
    total = sent(feedback, came[0]) + sent(feedback, came[1])
    codec, encoded = feedback.encode(0, came[2], in_bf16=True)
    assert (codec.name, feedback.norm) == ("bf16", 0.0)
    last = np.empty(SIZE, np.float32)
    codec.decode(encoded, last)
    np.testing.assert_allclose(total + last, np.sum(came, axis=0), rtol=0.01, atol=0.02)


def test_unequal_shares_add_up_to_the_gradient_of_all_samples() -> None:
    """Sums, divided once by the weight of the step: shares may change from step to step."""
    samples = np.random.default_rng(3).standard_normal((24, SIZE)).astype(np.float32)
    workers = [sender("int4"), sender("int4")]
    splits = [(3, 5), (7, 1), (2, 6)]
    total, first = np.zeros(SIZE, np.float32), 0
    for split in splits:
        for worker, count in zip(workers, split, strict=True):
            total += sent(worker, samples[first : first + count].sum(0))
            first += count
    for worker in workers:
        total += sent(worker, np.zeros(SIZE, np.float32), in_bf16=True)
    np.testing.assert_allclose(total, samples.sum(0), atol=0.1)


def test_a_lost_worker_takes_its_own_residual_alone() -> None:
    staying, lost = sender("int4"), sender("int4")
    total = sent(staying, draw(1)) + sent(lost, draw(2))
    owed = lost.norm
    del lost
    total += sent(staying, draw(3))
    total += sent(staying, np.zeros(SIZE, np.float32), in_bf16=True)
    missing = np.linalg.norm(draw(1) + draw(2) + draw(3) - total)
    assert missing == pytest.approx(owed, rel=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_block_that_is_not_finite_travels_as_bf16(bad: float) -> None:
    feedback = sender("int4")
    sent(feedback, draw(1))
    values = draw(2)
    values[700] = bad
    codec, encoded = feedback.encode(0, values)
    out = np.empty(SIZE, np.float32)
    codec.decode(encoded, out)
    assert codec.name == "bf16"
    assert np.argmax(np.abs(np.nan_to_num(out, nan=np.inf))) == 700
    assert feedback.norm == 0


def test_a_shorter_batch_makes_what_is_owed_count_less() -> None:
    feedback = sender("int4")
    first = draw(1)
    owed = first - sent(feedback, first, batch=8)
    out = sent(feedback, np.zeros(SIZE, np.float32), in_bf16=True, batch=2)
    np.testing.assert_allclose(out, owed / 4, rtol=0.01)


@pytest.mark.parametrize("name", LOSSY)
def test_one_that_forgot_encodes_as_one_that_has_just_come(name: str) -> None:
    old, new = sender(name), sender(name)
    sent(old, draw(1))
    sent(old, draw(2))
    old.clear_residuals()
    assert old.norm == 0
    np.testing.assert_array_equal(sent(old, draw(3)), sent(new, draw(3)))


def test_the_gradient_is_not_changed() -> None:
    values = draw(1)
    feedback = sender("int4")
    sent(feedback, values)
    np.testing.assert_array_equal(values, draw(1))
