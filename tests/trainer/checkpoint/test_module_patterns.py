"""Patterns of modules as PEFT has them; one that never ends is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.checkpoint import module_patterns
from trainer.checkpoint.module_patterns import values_by_pattern
from trainer.system.errors import InputError

MODULES = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(12) for part in "qkvo"]


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"q_proj": 2},
        {r"layers\.0\.self_attn\.(q|k)_proj": 6, "q_proj": 3, ".*": 1.5},
        {r"^model\.layers\.1\d\..*": 4, "absent": 1},
        {MODULES[5]: 7, "proj": 1},
    ],
)
def test_they_are_those_of_peft(patterns: dict[str, float]) -> None:
    other = pytest.importorskip("peft.utils.other", reason="the launcher-only install has none")
    found = values_by_pattern(patterns, MODULES, "rank_pattern")
    for module in MODULES:
        key = other.get_pattern_key(patterns.keys(), module)
        assert found.get(module) == patterns.get(key)


@pytest.mark.parametrize(
    "pattern", ["(a|a)*" * 8 + "(.*.*)*$x", "(([a-z_.0-9])+.)+[A-Z]([a-z])+", "(.|.)*X"]
)
def test_one_that_never_ends_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "_DEADLINE", 1.0)
    with pytest.raises(InputError, match="does not end within 1 s; name the modules") as caught:
        values_by_pattern({pattern: 1}, MODULES, "a/adapter_config.json: rank_pattern")
    assert str(caught.value).startswith("a/adapter_config.json: rank_pattern has a regular")


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        ({"(": 1}, "rank_pattern: not a regular expression: "),
        ({"a{99999999999}": 1}, "rank_pattern: not a regular expression: "),
        (["q_proj"], "rank_pattern must be an object of numbers"),
        ({"q_proj": "2"}, "rank_pattern must be an object of numbers"),
        ({"q_proj": True}, "rank_pattern must be an object of numbers"),
        ({str(n): 1 for n in range(10_001)}, "rank_pattern has 10,001 patterns; at most 10,000"),
    ],
    ids=["bracket", "repeats", "list", "text", "true", "many"],
)
def test_what_is_no_pattern_is_named(patterns: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        values_by_pattern(patterns, MODULES, "rank_pattern")
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)
