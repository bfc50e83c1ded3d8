"""The cache: made once, held while it is used, limited, emptied by a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.cli import trainer
from trainer.system.errors import InputError, StorageError
from trainer.system.storage import cache_folder
from trainer.system.storage.cache_folder import ensure_entry, list_entries
from trainer.system.storage.new_folder import write_new

ELSEWHERE = """
import sys
from trainer.system.storage.cache_folder import ensure_entry
print(ensure_entry(*sys.argv[1].split("-"), lambda: {"file": [b"x" * 1000]}), flush=True)
sys.stdin.read()
"""
SHARED = """
import sys
from pathlib import Path
from trainer.system.storage.cache_folder import ensure_entry

def pieces():
    with open(sys.argv[1], "a") as file:
        file.write("once")
    for _ in range(10):
        yield b"x" * 100

folder = ensure_entry("a", "0123456789abcdef", lambda: {"file": pieces()})
print(len((folder / "file").read_bytes()), flush=True)
"""


SAME = "0123456789abcdef"
A, B, C, D = (f"{name}-{SAME}" for name in "abcd")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made_elsewhere(*names: str) -> None:
    """Make entries of 1000 bytes in a process that has ended, the last one used last."""
    for number, name in enumerate(names):
        command = [sys.executable, "-c", ELSEWHERE, name]
        subprocess.run(command, input="", text=True, check=True, capture_output=True)
        os.utime(cache_folder.cache_root() / name, (number, number))


def names() -> set[str]:
    return {entry.path.name for entry in list_entries()}


def test_an_entry_is_made_once_and_again_after_damage(root: Path) -> None:
    made_elsewhere(A)
    assert ensure_entry("a", SAME, lambda: pytest.fail("it is there")) == root / A
    made_elsewhere(B)
    (root / B / "file").write_bytes(b"y" * 1000)
    assert (ensure_entry("b", SAME, lambda: {"file": [b"new"]}) / "file").read_bytes() == b"new"


def test_an_entry_that_is_cut_while_it_is_used_is_made_again(root: Path) -> None:
    """A process that uses it for days, such as one that evaluates checkpoints, needs no restart."""
    file = ensure_entry("a", SAME, lambda: {"file": [b"x" * 1000]}) / "file"
    os.truncate(file, 10)
    assert "start again" in cache_folder.damage_remedy(file)
    assert ensure_entry("a", SAME, lambda: {"file": [b"new"]}) == root / A
    assert file.read_bytes() == b"new"
    assert cache_folder.damage_remedy(root / "own" / "file") == "download or copy it again"


def test_processes_that_find_a_damaged_entry_make_it_once(root: Path) -> None:
    made_elsewhere(A)
    os.truncate(root / A / "file", 10)
    command = [sys.executable, "-c", SHARED, str(root.parent / "made")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0] for process in started] == ["1000\n"] * 4
    assert (root.parent / "made").read_text() == "once"
    assert not list(root.glob(".tmp-*"))


def test_the_least_recently_used_go_but_none_in_use(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_elsewhere(A, B, C)
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, A],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == str(root / A)
        os.utime(root / A, (0, 0))
        monkeypatch.setenv("MOTLEY_CACHE_GIB", str(2500 / cache_folder.GIB))
        ensure_entry("d", SAME, lambda: {"file": [b"z" * 1000]})
        assert names() == {A, D}
        shown = CliRunner().invoke(trainer, ["cache", "--clear"])
        assert "in use" in shown.output
        assert names() == {A, D}
        holder.communicate("")
    left = CliRunner().invoke(trainer, ["cache", "--clear"])
    assert "0.0 MB removed" in left.output
    assert names() == {D}  # this process holds it


def test_the_command_shows_what_there_is(root: Path) -> None:
    made_elsewhere(A)
    shown = CliRunner().invoke(trainer, ["cache"])
    assert f"{root / A}\n{root}: 0.0 MB of at most 68,719 MB\n" in shown.output
    cleared = CliRunner().invoke(trainer, ["cache", "--clear"])
    assert cleared.output == f"{root}: 0.0 MB removed\n"
    assert names() == set()


@pytest.mark.parametrize("limit", ["much", "-1", "nan"])
def test_a_limit_is_a_number(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("MOTLEY_CACHE_GIB", limit)
    with pytest.raises(InputError, match="give the limit in GiB, such as 64"):
        ensure_entry("a", SAME, lambda: {"file": [b""]})


@pytest.mark.parametrize("below", [".", "folder"])
def test_a_cache_that_cannot_be_made_is_named(
    root: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.write_text("a file")
    monkeypatch.setenv("MOTLEY_CACHE", str(root / below))
    for use in (
        lambda: ensure_entry("a", SAME, lambda: {"file": [b""]}),
        list_entries,
        cache_folder.clear_cache,
    ):
        with pytest.raises(StorageError, match=r"cache.*: the cache .*; set MOTLEY_CACHE to a fo"):
            use()


def test_a_users_own_models_and_checkpoints_are_none_of_the_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [root / "model", root / "step-000003", root / "latest"]
    for folder in own:
        write_new(folder, {"model.safetensors": [b"x" * 1000]})
    made_elsewhere(A)
    assert names() == {A}
    monkeypatch.setenv("MOTLEY_CACHE_GIB", "0")
    ensure_entry("b", SAME, lambda: {"file": [b"z" * 1000]})
    cleared = CliRunner().invoke(trainer, ["cache", "--clear"])
    assert cleared.exit_code == 0
    assert names() == {B}  # this process holds it
    assert all((folder / "model.safetensors").is_file() for folder in own)
