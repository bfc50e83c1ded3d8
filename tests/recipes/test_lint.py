"""Recipes and roles: what can be read off them (`make lint` runs ansible-lint)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import ROOT

BIN = Path(sys.executable).parent
RECIPES = sorted((ROOT / "recipes").glob("*.yml"))
ROLES = sorted(path for path in (ROOT / "playbooks/roles").iterdir() if path.is_dir())


def call(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1"}
    command = [str(word) for word in argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_no_rule_is_skipped() -> None:
    settings = yaml.safe_load((ROOT / ".ansible-lint").read_text(encoding="utf-8"))
    assert not {"skip_list", "warn_list", "enable_list", "mock_roles"} & settings.keys()
    assert settings["profile"] == "production"
    assert settings["offline"] is True
    assert not (ROOT / ".ansible-lint-ignore").exists()
    files = [*RECIPES, *(f for role in ROLES for f in role.rglob("*.yml"))]
    skipping = [f for f in files if re.search(r"#\s*noqa|skip_ansible_lint", f.read_text("utf-8"))]
    assert not skipping


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_syntax(path: Path) -> None:
    done = call(BIN / "ansible-playbook", "--syntax-check", path)
    assert done.returncode == 0, done.stderr


def test_the_order_of_the_cluster() -> None:
    refusals, roles = yaml.safe_load((ROOT / "recipes/gpu-training.yml").read_text("utf-8"))
    assert refusals["roles"] == [{"role": "validate", "tags": ["always", "validate"]}]
    assert refusals["max_fail_percentage"] == 0
    names = ["base", "nvidia", "vulkan", "share", "trainer", "verify"]
    assert roles["roles"] == [{"role": name, "tags": [name]} for name in names]
    assert "max_fail_percentage" not in roles, "a host that fails costs the others nothing"


def test_no_play_asks_about_mounts() -> None:
    """Fact gathering would hang on a share whose server is gone (ansible#25046)."""
    for path in RECIPES:
        for play in yaml.safe_load(path.read_text(encoding="utf-8")):
            if "hosts" in play and play["gather_facts"]:
                assert "!all" in play["gather_subset"]
                assert not {"hardware", "mounts", "all"} & set(play["gather_subset"])


def test_host_keys_are_checked_everywhere() -> None:
    settings = (ROOT / "ansible.cfg").read_text(encoding="utf-8")
    assert re.search(r"^host_key_checking = True$", settings, re.MULTILINE)
    files = [ROOT / "ansible.cfg", *(ROOT / "inventory").glob("*.yml"), *RECIPES]
    every = (file for role in ROLES for file in role.rglob("*") if file.is_file())
    files += [file for file in every if file.suffix != ".pyc"]
    off = re.compile(
        r"StrictHostKeyChecking[ =]+(?:no|off|accept)|UserKnownHostsFile[ =]+/dev/null"
    )
    assert not [file for file in files if off.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_role_has_specs_and_can_be_undone(role: Path) -> None:
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    entries = specs["argument_specs"]
    options = {name for entry in entries.values() for name in entry.get("options", {})}
    shared = ("motley_", "share_") if role.name == "validate" else ("motley_",)
    assert all(name.startswith((f"{role.name}_", *shared)) for name in options)
    defaults_file = role / "defaults/main.yml"
    defaults = yaml.safe_load(defaults_file.read_text("utf-8")) if defaults_file.exists() else {}
    assert set(defaults) <= options, "a default that no spec describes"
    if role.name not in ("validate", "cluster", "verify"):  # these change nothing
        assert "reset" in entries
        assert (role / "tasks/reset.yml").exists()


def test_the_readmes_are_up_to_date() -> None:
    done = call(sys.executable, "scripts/role_readmes.py", "--check")
    assert done.returncode == 0, done.stderr
