"""What a student compares with: sums, exactness, unbiasedness, other temperatures."""

import numpy as np
import pytest
from tiny_logits import SCHEMES, VOCABULARY, draw_logits, score

from trainer.errors import InputError
from trainer.logits.scores import Scheme
from trainer.logits.targets import targets

STUDENT = np.arange(0, VOCABULARY, 2, dtype=np.int32)
"""The teacher's ids of a student with half the tokens."""


def dense(soft, vocabulary=VOCABULARY):
    out = np.zeros((len(soft.rest), vocabulary))
    for t in range(len(soft.rest)):
        entries = slice(soft.offsets[t], soft.offsets[t + 1])
        out[t, soft.ids[entries]] = soft.weights[entries]
    return out


def softmax(logits, temperature=1.0):
    p = np.exp(logits / temperature - (logits / temperature).max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def entropy(p):
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)


def spread(logits, top_k, temperature=1.0, student=STUDENT):
    """Return the student's distribution: dropped mass on what is not kept, in proportion."""
    p = softmax(logits)[:, student]
    for row in p:
        others = np.argsort(-row, kind="stable")[top_k:]
        row[others] *= 1 + (1 - row.sum()) / row[others].sum()
    p = p ** (1 / temperature)
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("student", [None, STUDENT], ids=["whole", "trimmed"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("kind", SCHEMES)
def test_every_position_sums_to_one(kind, divergence, temperature, student):
    scheme = SCHEMES[kind]
    if (kind == "sampled" and divergence != "forward") or (
        kind in ("sampled", "kept") and temperature != 1
    ):
        pytest.raises(InputError, targets, None, scheme, temperature, divergence)
        return
    rng = np.random.default_rng(3)
    scores = score(draw_logits(rng, 50), scheme, rng, student)
    soft = targets(scores, scheme, temperature, divergence)
    sums = dense(soft).sum(axis=1) + soft.rest
    np.testing.assert_allclose(sums, [0] + [1] * 50, atol=1e-6)
    assert soft.entropy[0] == 0
    assert soft.temperature == temperature
    assert (soft.weights.dtype, soft.ids.dtype, soft.offsets.dtype) == ("f4", "i4", "i8")
