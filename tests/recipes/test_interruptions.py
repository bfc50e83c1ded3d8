"""No role depends on what a play remembers: an interruption would lose it, and reruns say "ok".

A notified handler never runs, and `is changed` is false the next time. Roles ask the host instead
(`motley_unread_settings`, `motley_apt_unread`), or do each time what does no harm (daemon-reload).
What booted hosts do when a play is killed after each task: tests/testbed/test_interrupted.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.recipes.plugins import load

FILES = sorted(
    path
    for folder in ("playbooks", "recipes", "molecule")
    for path in (ROOT / folder).rglob("*.yml")
    if path.parent.name not in ("defaults", "meta", "vars")
)
SAID = {"changed_when", "failed_when", "name", "register"}
"""Keys that decide what a play says, and not what it does."""
REMEMBERED = re.compile(
    r"\bis (?:not )?changed\b|\.changed\b|selectattr\('changed'|is (?:not )?change\b"
)
CHECK_MODE = re.compile(r"not \(ansible_check_mode and \w+ is changed\)")
"""Check mode does not do what it foresees; nothing else hangs on it."""
REVIEWED = {
    ("base/sshd_back", "Reload sshd"): "takes back the reload of this very play",
}


def tasks(items: Any) -> Iterator[dict[str, Any]]:
    """Yield every task and play of a file, with those in blocks."""
    for item in items or []:
        if isinstance(item, dict):
            yield item
            for part in (
                "block",
                "rescue",
                "always",
                "tasks",
                "pre_tasks",
                "post_tasks",
                "handlers",
            ):
                yield from tasks(item.get(part))


def words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in SAID and key not in ("block", "rescue", "always", "tasks"):
                yield from words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from words(inner)
    elif isinstance(value, str):
        yield value


def remembering(items: Any) -> list[str]:
    """Return the names of tasks that do something because an earlier one changed something."""
    found: list[str] = []
    for task in tasks(items):
        hangs = [key for key in ("notify", "listen", "handlers") if key in task]
        hangs += [w for w in words(task) if REMEMBERED.search(CHECK_MODE.sub("", w))]
        hangs += [w for w in words(task.get("ansible.builtin.meta")) if w == "flush_handlers"]
        if hangs:
            found.append(str(task.get("name")))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_no_task_depends_on_what_a_play_remembers(path: Path) -> None:
    role = f"{path.parts[-3]}/{path.stem}"
    reviewed = [name for file, name in REVIEWED if file == role]
    assert path.parent.name != "handlers"
    assert remembering(yaml.safe_load(path.read_text(encoding="utf-8"))) == reviewed


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"notify": "Reload it"}, 1),
        ({"when": ["a", "wrote is changed"]}, 1),
        ({"when": "wrote.changed"}, 1),
        ({"loop": "{{ wrote.results | selectattr('changed') }}"}, 1),
        ({"ansible.builtin.apt": {"cache_valid_time": "{{ 0 if wrote is changed else 9 }}"}}, 1),
        ({"ansible.builtin.meta": "flush_handlers"}, 1),
        ({"when": "not (ansible_check_mode and wrote is changed)"}, 0),
        ({"changed_when": "(wrote.stdout | from_json).changed"}, 0),
    ],
)
def test_the_test_sees_such_a_task(keys: dict[str, Any], count: int) -> None:
    task = {"name": "Act", **keys}
    assert len(remembering([{"name": "All", "block": [task]}])) == count


# (file written, unit started by the wall clock, started since boot, now, now since boot)
@pytest.mark.parametrize(
    ("case", "written", "wall", "monotonic", "now", "stale"),
    [
        ("started after", 1000.5, 1001, 101.2, (1100.0, 200.0), False),
        ("in the same second", 1001.1, 1001, 101.2, (1100.0, 200.0), False),
        ("started before", 1000.5, 900, 0.2, (1100.0, 200.0), True),
        ("the clock was ahead when it started", 1000.5, 8000, 50.0, (1100.0, 200.0), True),
        ("the clock was set back since", 1000.5, 1001, 101.2, (1000.0, 200.0), True),
        ("the clock was set forward since", 1000.5, 1001, 101.2, (5000.0, 200.0), False),
        ("suspended between the two", 5000.5, 900, 50.0, (5100.0, 150.0), True),
        ("suspended after both", 1000.5, 1001, 101.2, (9000.0, 200.0), False),
        ("written, suspended, asked", 1000.5, 900, 50.0, (9000.0, 160.0), True),
    ],
)
def test_settings_are_newer_than_a_unit_by_either_clock(
    case: str, written: float, wall: int, monotonic: float, now: tuple[float, float], stale: bool
) -> None:
    module = load("library/motley_unread_settings.py")
    assert module.newer(written, wall, monotonic, now) is stale, case


def test_a_folder_is_as_new_as_what_was_made_or_removed_there(tmp_path: Path) -> None:
    module = load("library/motley_unread_settings.py")
    assert module.modified([str(tmp_path / "none")]) == 0.0
    (tmp_path / "a").write_text("")
    before = module.modified([str(tmp_path)])
    (tmp_path / "a").unlink()
    assert module.modified([str(tmp_path / "a"), str(tmp_path)]) > before
