"""YAML is read as it stands; what is deep, large or doubled is refused with its place, at once."""

from __future__ import annotations

import pytest
import yaml

from trainer.system.yaml_tree import DEEPEST, LONGEST, MOST_NODES, describe_error, parse_yaml


def test_settings_are_read() -> None:
    text = "a: &x {b: [1, 2.5, yes, null, text]}\nc: *x\nd: {<<: *x, e: 2026-01-01}\n"
    found = parse_yaml(text)
    assert found["c"] == {"b": [1, 2.5, True, None, "text"]}
    assert found["d"]["b"] == found["c"]["b"]
    assert found == parse_yaml(text.encode()) == yaml.safe_load(text)
    assert parse_yaml("") is None
    assert parse_yaml("[" * (DEEPEST - 1) + "]" * (DEEPEST - 1))


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
)
BOMBS = {
    "laughs": (LAUGHS, f"has more than {MOST_NODES:,} values"),
    "merges": (
        "a0: &a0 {x: 1}\n"
        + "".join(
            f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 30)
        ),
        f"has more than {MOST_NODES:,} values",
    ),
    "depth": ("[" * 100_000, f"nested deeper than {DEEPEST} levels"),
    "depth of mappings": ("{a: " * 100_000, f"nested deeper than {DEEPEST} levels"),
    "a circle": ("a: &a [*a]", "the alias 'a' is within its own anchor"),
    "many": ("[" + "1," * (MOST_NODES + 1) + "]", f"has more than {MOST_NODES:,} values"),
    "a number": ("a: 0x" + "f" * 100_000, "a number or date is too long"),
    "a number of sixties": ("a: " + "1:" * 100_000 + "1", "a number or date is too long"),
    "size": ("a: " + "x" * LONGEST, f"has more than {LONGEST:,} characters"),
    "a date": ("a: 2026-13-01", "month must be in 1..12"),
    "a key twice": ("a: 1\nb: 2\na: 3", "the key 'a' occurs twice"),
    "an odd key": ("? {a: 1}\n: 2", "found unhashable key"),
    "an object": ("a: !!python/object:os.system {}", "could not determine a constructor"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_no_settings_are_is_refused(name: str) -> None:
    text, problem = BOMBS[name]
    with pytest.raises(yaml.YAMLError) as caught:
        parse_yaml(text)
    where, said = describe_error(caught.value)
    assert said.startswith(problem)
    assert "\n" not in said
    if name == "a key twice":
        assert where == ":3:1"
