"""F-IN-002: a value that is not plain is refused, at any place of what a host sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.system.untrusted_data import LONGEST, drop_odd_values, parse_json, validate_data

ODD = (
    math.nan,
    math.inf,
    -math.inf,
    1.7e308,
    10**400,
    -(10**400),
    2**63,
    "RTX 4090\ntouch /tmp/x",
    "a\rb",
    "\x1b]0;title\x07",
    "\u202egnp",
    "\ud800",
    "x" * (LONGEST + 1),
)
PLAIN = st.none() | st.booleans() | st.integers(-100, 100) | st.text("abc", max_size=3)


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return trees with a leaf somewhere among plain values."""
    return st.recursive(
        leaf,
        lambda inner: (
            st.builds(
                lambda key, value, beside: {**beside, key: value},
                st.text("abc", max_size=3),
                inner,
                st.dictionaries(st.text("def", max_size=3), PLAIN, max_size=2),
            )
            | st.builds(lambda before, value: [*before, value], st.lists(PLAIN, max_size=2), inner)
        ),
        max_leaves=1,
    )


@given(nested(st.sampled_from(ODD)))
def test_an_odd_value_is_refused_in_one_plain_line(tree: Any) -> None:
    with pytest.raises(ValueError, match="answer: ") as caught:
        validate_data(object, tree, "answer")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_figures_of_a_diverging_run_pass() -> None:
    assert validate_data(dict[str, float], {"grad_norm": 3.4e38}, "status") == {"grad_norm": 3.4e38}
    with pytest.raises(ValueError, match="step"):
        validate_data(dict[str, int], {"step": 1e38}, "status")


@given(nested(PLAIN))
def test_plain_values_pass(tree: Any) -> None:
    assert validate_data(object, tree, "answer") == tree


@given(nested(st.sampled_from((-1, -0.5, -(2**62)))))
def test_negative_numbers_are_refused_where_none_can_be(tree: Any) -> None:
    assert validate_data(object, tree, "answer") == tree
    with pytest.raises(ValueError, match=r"less than 0$"):
        validate_data(object, tree, "answer", least=0)


def test_keys_are_texts_too() -> None:
    with pytest.raises(ValueError, match="control characters"):
        validate_data(dict[str, int], {"a\nb": 1}, "answer")


def test_lines_pass_where_they_are_expected() -> None:
    assert validate_data(str, "one\ntwo\x1b[0m", "log", lines=True) == "one\ntwo\x1b[0m"
    with pytest.raises(ValueError, match="finite"):
        validate_data(float, math.nan, "clock", lines=True)


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b"9" * 5000])
def test_what_is_no_number_of_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="answer: "):
        validate_data(object, parse_json(text, "answer"), "answer")


@pytest.mark.parametrize("odd", [value for value in ODD if not isinstance(value, str)])
def test_a_report_is_kept_without_what_is_odd(odd: float) -> None:
    report = {
        "step": 3,
        "loss": odd,
        "validation": {"accuracy": odd, "loss": 1.0},
        "pair": [1, odd],
    }
    assert drop_odd_values(report) == {
        "step": 3,
        "validation": {"loss": 1.0},
        "invalid": ["loss", "validation.accuracy", "pair.1"],
    }
    assert drop_odd_values({"step": 3, "reason": "two\nlines"}) == {
        "step": 3,
        "reason": "two\nlines",
    }


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"x" * 60: inner}])
def test_what_is_nested_too_deep_is_odd(wrap: Callable[[Any], Any]) -> None:
    """As JSON text it may be: a reader of JSON goes deeper than Python's own functions."""
    deep: Any = 1
    for _ in range(5000):
        deep = wrap(deep)
    with pytest.raises(ValueError, match="nested deeper than") as caught:
        validate_data(object, deep, "answer")
    assert len(str(caught.value)) < 300
    kept = drop_odd_values({"step": 3, "loss": deep})
    assert validate_data(dict[str, Any], kept, "report")["step"] == 3
    assert len(kept["invalid"]) == 1
