"""What is drawn: the likeliest, or tokens as often as their probability says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError, NonFiniteError

LOGITS = np.array([0.5, -1.0, 2.0, 0.0, 1.5, -0.5], np.float32)
DRAWS = 4000


def draw(**settings: Any) -> np.ndarray:
    """Return how often each token comes first in many samples."""
    rows = np.tile(LOGITS, (DRAWS, 1))
    tokens = Sampling(**settings).choose_tokens(rows, range(DRAWS), 0)
    return np.bincount(tokens, minlength=len(LOGITS))


def probabilities(temperature: float, allowed: list[int]) -> np.ndarray:
    weights = np.zeros(len(LOGITS))
    weights[allowed] = np.exp(LOGITS[allowed].astype(np.float64) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_k": 3}, [0, 2, 4]),
        # The likeliest have 0.46, 0.28 and 0.10: the third one reaches 0.8.
        ({"temperature": 1.0, "top_p": 0.8}, [0, 2, 4]),
        # Of two tokens the first alone has 0.62.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [2]),
    ],
)
def test_frequencies_are_those_of_softmax(settings: dict[str, Any], allowed: list[int]) -> None:
    counts = draw(seed=1, **settings)
    expected = DRAWS * probabilities(settings["temperature"], allowed)
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    chi_square = ((counts[there] - expected[there]) ** 2 / expected[there]).sum()
    # Above it in one of a thousand seeds, by degrees of freedom.
    assert chi_square <= {0: 0.0, 2: 13.8, 5: 20.5}[there.sum() - 1]


def test_places_are_independent_of_each_other_and_of_the_batch() -> None:
    sampling = Sampling(temperature=1.0, seed=2)
    rows = np.tile(LOGITS, (3, 1))
    found = [sampling.choose_tokens(rows, [0, 1, 2], place).tolist() for place in range(40)]
    again = [
        [int(sampling.choose_tokens(rows[:1], [sample], place)[0]) for sample in range(3)]
        for place in range(40)
    ]
    assert found == again
    by_sample = [tuple(tokens) for tokens in zip(*found, strict=True)]
    assert len(set(by_sample)) == 3
    other = Sampling(temperature=1.0, seed=3)
    assert found != [other.choose_tokens(rows, [0, 1, 2], place).tolist() for place in range(40)]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-9}]
)
def test_the_likeliest_token(settings: dict[str, Any]) -> None:
    assert draw(**settings).tolist() == [0, 0, DRAWS, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-60, 1e-310, 5e-324])
@pytest.mark.parametrize("offset", [0.0, -8.0])
def test_the_smallest_temperatures_draw_the_likeliest_tokens(
    temperature: float, offset: float
) -> None:
    """Those that are equally likely are drawn equally often."""
    rows = np.tile(np.append(LOGITS, LOGITS.max()) + np.float32(offset), (DRAWS, 1))
    tokens = Sampling(temperature=temperature, seed=1).choose_tokens(rows, range(DRAWS), 0)
    counts = np.bincount(tokens, minlength=7)
    assert counts[[0, 1, 3, 4, 5]].sum() == 0
    assert abs(counts[2] - counts[6]) < 3.3 * DRAWS**0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_token_is_drawn_from_what_is_no_number(value: float) -> None:
    rows = np.tile(LOGITS, (2, 1))
    rows[1, 3] = value
    with pytest.raises(NonFiniteError, match=r"sample 7: NaN or Inf .* new token 4"):
        Sampling().choose_tokens(rows, [5, 7], 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top-k must be at least 1"),
        ({"top_p": 0.0}, "top-p must be above 0"),
        ({"top_p": 1.5}, "top-p must be above 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**settings)
