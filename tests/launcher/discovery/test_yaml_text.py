"""Single values in a YAML file: all other bytes stay."""

from __future__ import annotations

import pytest
import yaml

from launcher.discovery.yaml_text import YamlText, as_comment, as_yaml
from launcher.errors import ConfigError

EDITED = """\
# mine
all:
    vars: {share_server:   "b"}   # by hand
    hosts:
        a:   # the big one
            ansible_host: 10.0.0.1     # static
            motley_devices:
            - {backend: cpu,   threads: 2}

        b: {ansible_host: '10.0.0.2'}
        c:
    children:
        gpus: {hosts: {a: , b: }}
# the end
"""


def lines_of(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return the lines that only the first and only the second text have."""
    old, new = before.splitlines(), after.splitlines()
    return [x for x in old if x not in new], [x for x in new if x not in old]


@pytest.mark.parametrize(
    ("path", "value", "gone", "come"),
    [
        (
            "all.hosts.a.ansible_host",
            "10.0.0.9",
            "            ansible_host: 10.0.0.1     # static",
            "            ansible_host: 10.0.0.9     # static",
        ),
        ("all.hosts.a.ansible_port", 2222, None, "            ansible_port: 2222  # why"),
        (
            "all.hosts.b.ansible_host",
            "10.0.0.3",
            "        b: {ansible_host: '10.0.0.2'}",
            "        b: {ansible_host: 10.0.0.3}",
        ),
        (
            "all.hosts.b.motley_link_rates",
            {"a": 941},
            "        b: {ansible_host: '10.0.0.2'}",
            "        b: {ansible_host: '10.0.0.2', motley_link_rates: {a: 941}}",
        ),
        ("all.hosts.c.ansible_host", "fe00::1", None, '          ansible_host: "fe00::1"  # why'),
        ("all.hosts.d", {}, None, "        d: {}  # why"),
        ("all.vars.share_server", "b", None, None),
        (
            "all.vars.other",
            True,
            '    vars: {share_server:   "b"}   # by hand',
            '    vars: {share_server:   "b", other: true}   # by hand',
        ),
        ("all.hosts.e.motley_teacher", True, None, "          motley_teacher: true  # why"),
    ],
)
def test_only_one_line_changes(
    path: str, value: object, gone: str | None, come: str | None
) -> None:
    text = YamlText("f.yml", EDITED)
    keys = path.split(".")
    text.set(keys, value, "why")
    assert text.get(keys) == value
    lost, won = lines_of(EDITED, text.text)
    assert lost == ([] if gone is None else [gone])
    assert won[-1:] == ([] if come is None else [come])
    assert len(won) <= 2  # a new host has a line of its own
    tree = yaml.safe_load(text.text)
    for key in keys:
        tree = tree[key]
    assert tree == value
    before = text.text
    text.set(keys, value, "why")
    assert text.text == before


def test_a_comment_cannot_begin_a_line() -> None:
    """Part of it is what a host calls its devices."""
    text = YamlText("f.yml", "all: {}\n")
    text.set(("all", "hosts"), {}, "evil\n  motley_coordinator: true\x1b[2J")
    assert yaml.safe_load(text.text) == {"all": {"hosts": {}}}
    assert "\x1b" not in text.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "f.yml:2: not YAML: "),
        ("- a\n", "f.yml: not a YAML inventory"),
        ("[gpus]\nlambda ansible_host=1\n", "f.yml:2: not YAML"),
        ("", "f.yml: not a YAML inventory"),
    ],
)
def test_what_is_no_inventory(content: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        YamlText("f.yml", content)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_list_in_the_place_of_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"f\.yml:3: all\.hosts is not a mapping"):
        YamlText("f.yml", "all:\n  hosts:\n    - a\n").set(("all", "hosts", "b"), {})


@pytest.mark.parametrize(
    "text",
    [
        *("a\nb: c", "a\r\nb", "a # b", "a: b", "\ta'\"", "a\u2028b\u2029", "a\x85b", "a\x7f\x9b"),
        *("\ufeff\ufffe", "\ud800", "\U0001f600", "{a}", "- a", "null", "1e3", "", "x y" * 300),
    ],
)
def test_any_text_is_one_value_and_a_comment_ends_no_line(text: str) -> None:
    tree = {"a": text, text: [text, {"b": text}]}
    line = as_yaml(tree)
    assert "\n" not in line
    assert yaml.safe_load(line) == tree
    assert yaml.safe_load(f"{as_comment(text)}\nb: 1\n") == {"b": 1}

    written = YamlText("f.yml", EDITED)
    written.set(["all", "hosts", text or "z", "ansible_host"], text, text)
    host = yaml.safe_load(written.text)["all"]["hosts"].pop(text or "z")
    assert host == {"ansible_host": text}
    assert "b: c" not in written.text.splitlines()
