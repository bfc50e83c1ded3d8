"""No Python that Motley starts imports what lies in the current folder.

`-P` leaves the folder out of the search path, and so does `-I`, also on the Python 3.10 of a host
that is set up. Motley's own scripts (`python scripts/x.py`) search the folder that they lie in.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.agent.checks.host import check_cuda
from launcher.errors import LauncherError
from launcher.hosts.bootstrap import agent_command
from launcher.installation.venvs import Uv, make_venv, python_runs
from launcher.inventory.hosts import Host, load_inventory
from launcher.plan.placement import build_environment
from launcher.transfer.wheel import build_wheel
from tests import ROOT
from trainer.run.composition.roles import Placement, build_worker_command

PROGRAMS = [
    path for name in ("launcher", "trainer") for path in sorted((ROOT / name).rglob("*.py"))
]
PLAYS = [
    path
    for path in sorted((ROOT / "playbooks").rglob("*"))
    if path.is_file() and path.suffix != ".pyc"
]
SAFE = {"-P", "-I"}
TAKES_CODE = {"-m", "-c", "-"}
_IN_TEXT = re.compile(r"python[0-9.]*[\"']?((?:\s+-[A-Za-z]+)*?)\s+-(?:m|c)\b")


def unsafe_lists(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of command lines that start Python without `-P`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
        if words and isinstance(words[0], str) and Path(words[0]).name in ("sh", "bash", "rsync"):
            continue
        first = next((n for n, word in enumerate(words) if word in ("-m", "-c")), None)
        if first is not None and not SAFE & {word for word in words[:first] if word}:
            yield node.lineno


def unsafe_words(text: str) -> list[str]:
    """Return what starts Python without `-P` in a shell script, a template or a docstring."""
    return [found[0] for found in _IN_TEXT.finditer(text) if not SAFE & set(found[1].split())]


def unsafe_arguments(tree: Any) -> Iterator[list[Any]]:
    """Yield the argument lists of a playbook that start Python so."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from unsafe_arguments(value)
    elif isinstance(tree, list):
        for place, word in enumerate(tree[:-1]):
            later = tree[place + 1 :]
            code = next((n for n, each in enumerate(later) if str(each) in TAKES_CODE), None)
            starts = isinstance(word, str) and "python" in word and code is not None
            if starts and not SAFE & {str(each) for each in later[:code]}:
                yield tree
        for value in tree:
            yield from unsafe_arguments(value)


def test_every_command_line_of_ours_has_it() -> None:
    found: dict[str, object] = {}
    for path in PROGRAMS:
        text = path.read_text()
        if wrong := [*unsafe_lists(ast.parse(text)), *unsafe_words(text)]:
            found[str(path)] = wrong
    assert found == {}


def test_every_template_task_and_file_of_the_recipes_has_it() -> None:
    for path in PLAYS:
        text = path.read_text()
        if path.suffix == ".md":
            continue
        assert unsafe_words(text) == [], path
        assert not re.search(r"/python3', '-'", text), path
        if path.suffix == ".yml":
            assert list(unsafe_arguments(yaml.safe_load(text))) == [], path
            assert not re.search(r"executable: /usr/bin/python3$", text, re.MULTILINE), path
        first = text.partition("\n")[0]
        assert not (first.startswith("#!") and "python" in first) or first.endswith(" -I"), path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('["x", "-m", "launcher.agent"]', 1),
        ('["x", "-P", "-m", "launcher.agent"]', 0),
        ('[python, "-c", "", *more]', 1),
        ('["sh", "-c", "x"]', 0),
    ],
)
def test_the_search_finds_what_it_should(text: str, found: int) -> None:
    assert len(list(unsafe_lists(ast.parse(text)))) == found
    assert unsafe_words(
        "exec python -m x; /bin/python3 -c y; python -P -m z; python3.11 -I -c q"
    ) == [
        "python -m",
        "python3 -c",
    ]
    assert list(unsafe_arguments({"argv": ["/usr/bin/python3", "-", "x"]})) != []


def test_the_agent_of_a_host_has_it_by_every_way() -> None:
    command = agent_command(Host(name="a", trainer_command=("/opt/trainer",)))
    assert command.count("-m launcher.agent") == command.count("-P -m launcher.agent") == 3


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder where every module that a program of ours may import is planted."""
    proof = tmp_path / "it ran"
    folder = tmp_path / "trap"
    folder.mkdir()
    planted = (
        "jinja2",
        "yaml",
        "ansible",
        "torch",
        "click",
        "pip",
        "venv",
        "ensurepip",
        "launcher",
    )
    for name in (*planted, "trainer", "numpy", "logging", "subprocess", "setuptools", "shutil"):
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return proof


def test_the_trap_works(trap: Path) -> None:
    subprocess.run([sys.executable, "-m", "jinja2"], check=True)
    assert trap.exists()


@pytest.mark.long
def test_what_lies_in_the_current_folder_is_not_imported(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert [host.name for host in load_inventory()] == ["localhost"]
    assert "torch" in check_cuda(sys.executable, []).detail
    make_venv(tmp_path / "environment")
    assert python_runs(tmp_path / "environment")
    uv = Uv(tmp_path / "environment", tmp_path / "scratch", lambda _: None)
    with pytest.raises(LauncherError, match="pip install failed"):
        uv.configure(f"nothing-of-that-name==1.0 --hash=sha256:{'0' * 64}")
    build_wheel(ROOT, tmp_path / "wheel")
    assert not trap.exists()


def test_a_worker_beside_the_coordinator_does_not_either(trap: Path) -> None:
    place = Placement(gpus=["0"], backend="cpu", threads=1, rank=None, tls_dir=None)
    command = build_worker_command(9999, "run", place, 0, "0", "127.0.0.1:1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "/dev/fd/9999" in done.stderr) == (2, True)
    assert not trap.exists()


def test_what_a_process_of_a_run_starts_does_not_either(trap: Path) -> None:
    """Libraries of the trainer start Python as well, without asking anybody for options."""
    given = {**os.environ, **build_environment(1)}
    done = subprocess.run([sys.executable, "-c", "import jinja2"], env=given, capture_output=True)
    assert (done.returncode, trap.exists()) == (0, False)
