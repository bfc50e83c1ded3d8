"""Root touches nothing below a folder that the run user may write, where a link may be planted.

What booted hosts do with planted links: tests/testbed/test_planted_links.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

ROLES = ROOT / "playbooks" / "roles"
FOLDERS = re.compile(r"(/var/lib/motley|/opt/motley|/srv/motley/(logits|checkpoints))/")
"""Folders of the run user, by the defaults of the roles."""
HARMLESS = {"stat"}
"""Modules that only look, and hand no content on."""
Task = dict[str, Any]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def variables(role: str) -> dict[str, str]:
    found: dict[str, Any] = {}
    for kind in ("defaults", "vars"):
        found |= load(ROLES / role / kind / "main.yml") or {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def resolved(text: str, known: dict[str, str]) -> str:
    """Return a template with the roles' own variables and defaults put in."""
    for _ in range(5):
        text = re.sub(r"\{\{ \w+ \| default\('([^']*)'\) \}\}", r"\1", text)
        text = re.sub(r"\{\{ (\w+)[^}]*\}\}", lambda m: known.get(m[1], m[0]), text)
    return text


def tasks(items: list[Task], user: str | None = None) -> Iterator[tuple[Task, str | None]]:
    """Yield every task with the user that it becomes; None for root."""
    for task in items:
        own = task.get("become_user", user)
        if task.get("become") is False or task.get("delegate_to") == "localhost":
            continue
        for part in ("block", "rescue", "always"):
            yield from tasks(task.get(part, []), own)
        yield task, own


def words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for item in value.values() for word in words(item)]
    if isinstance(value, list):
        return [word for item in value for word in words(item)]
    return [value] if isinstance(value, str) else []


def touched(task: Task, known: dict[str, str]) -> list[str]:
    """Return the paths below the run user's folders that a task gives to a module of root's."""
    found: list[str] = []
    for key, value in task.items():
        if not key.startswith("ansible.builtin.") or key.rpartition(".")[2] in HARMLESS:
            continue
        if isinstance(value, dict):
            if value.get("state") == "absent":
                continue  # a link is removed itself, and a folder without following any
            argv = value.get("argv")
            if isinstance(argv, list) and argv[:2] == ["runuser", "-u"]:
                continue
            value = {k: v for k, v in value.items() if k not in ("msg", "that", "fail_msg")}
        loop = words(task.get("loop")) if "item" in str(value) else []
        for word in words(value) + loop:
            path = resolved(word, known)
            if FOLDERS.search(path):
                found.append(path)
    return found


FILES = [path for kind in ("tasks", "handlers") for path in sorted(ROLES.glob(f"*/{kind}/*.yml"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_root_stays_out_of_the_run_users_folders(path: Path) -> None:
    known = variables(path.parts[-3])
    for task, user in tasks(load(path) or []):
        if user is None:
            assert touched(task, known) == [], f"{path.parts[-3]}: {task['name']}"


def test_the_test_sees_such_a_task() -> None:
    known = {"folder": "{{ motley_state_folder | default('/var/lib/motley') }}"}
    make = {"path": "{{ folder }}/inputs", "state": "directory"}
    task = {"name": "Make it", "ansible.builtin.file": make}
    assert touched(task, known) == ["/var/lib/motley/inputs"]
    assert [user for _, user in tasks([{**task, "become_user": "motley"}])] == ["motley"]
    run = {"argv": ["/opt/motley/current/bin/python", "--version"]}
    assert touched({"name": "Run it", "ansible.builtin.command": run}, known)
    fenced = {"argv": ["runuser", "-u", "motley", "--", *run["argv"]]}
    assert not touched({"name": "Run it", "ansible.builtin.command": fenced}, known)
