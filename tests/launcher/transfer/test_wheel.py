"""The wheel of this checkout: complete, and the same bytes whoever builds it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.errors import ConfigError, LauncherError
from launcher.installation.environments import WheelFacts, read_wheel
from launcher.transfer import wheel
from launcher.transfer.wheel import build_wheel, checkout_folder
from tests import ROOT

pytestmark = pytest.mark.long

PROGRAM = [sys.executable, "-P", "-m", "launcher.transfer.wheel"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def printed(output: Path) -> dict[str, str]:
    """Return what the program has printed, of a wheel of this checkout."""
    result = subprocess.run(
        [*PROGRAM, "--output", output],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def built(printed: dict[str, str]) -> WheelFacts:
    return read_wheel(Path(printed["wheel"]))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources as another user with another umask would have them."""
    folder = tmp_path_factory.mktemp("clone") / "elsewhere"
    folder.mkdir()
    for name in ("launcher", "trainer", "inventory"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    for path in folder.rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (1, 1_700_000_000))
    return folder


def test_this_runs_from_a_checkout() -> None:
    assert checkout_folder() == ROOT


def test_links_become_files(built: WheelFacts) -> None:
    with zipfile.ZipFile(built.path) as archive:
        text = archive.read("launcher/inventory/local.yml")
    assert text == (ROOT / "inventory" / "local.yml").read_bytes()


def test_every_module_is_in_it(built: WheelFacts) -> None:
    with zipfile.ZipFile(built.path) as archive:
        names = set(archive.namelist())
    sources = {
        str(path.relative_to(ROOT))
        for top in ("launcher", "trainer")
        for path in (ROOT / top).rglob("*.py")
    }
    assert sources <= names


def test_equal_sources_give_equal_bytes_whatever_an_earlier_build_left(
    built: WheelFacts, clone: Path, tmp_path: Path
) -> None:
    left = clone / "build" / "lib" / "launcher"
    left.mkdir(parents=True)
    (left / "ghost.py").write_text("")
    before = os.umask(0o077)
    try:
        again = build_wheel(clone, tmp_path / "again")
    finally:
        os.umask(before)
    assert again.sha256 == built.sha256
    assert again.path.stat().st_mode & 0o777 == 0o644
    assert not list(clone.glob("*.egg-info"))


def test_other_sources_give_another_hash(built: WheelFacts, clone: Path, tmp_path: Path) -> None:
    changed = clone / "trainer" / "system" / "errors.py"
    text = changed.read_text()
    changed.write_text(f"{text}# changed\n")
    try:
        assert build_wheel(clone, tmp_path / "after").sha256 != built.sha256
    finally:
        changed.write_text(text)


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a checkout of Motley:pyproject\.toml"):
        build_wheel(tmp_path, tmp_path / "out")


def test_a_broken_checkout_gives_the_builders_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    for name in ("launcher", "trainer"):
        (broken / name).mkdir(parents=True)
    for name in ("README.md", "LICENSE"):
        (broken / name).touch()
    (broken / "pyproject.toml").write_text("[project\n")
    with pytest.raises(LauncherError, match="could not build") as failure:
        build_wheel(broken, tmp_path / "out")
    assert "Expected ']' at the end of a table" in failure.value.details[-1]
    assert not any("File " in line for line in failure.value.details), "no traceback"
    assert not list((tmp_path / "out").iterdir())


def test_without_setuptools_none_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "find_spec", lambda _: None)
    with pytest.raises(LauncherError, match="no setuptools to build a wheel with: make setup"):
        build_wheel(ROOT, tmp_path)


def test_the_locks_of_hosts_are_in_it(built: WheelFacts) -> None:
    with zipfile.ZipFile(built.path) as archive:
        names = {name for name in archive.namelist() if name.startswith("launcher/locks/")}
        texts = {name: archive.read(name) for name in names}
    assert names == {
        f"launcher/locks/{name}.txt"
        for name in ("coordinator", "trainer", "torch-cpu", "torch-cuda", "uv")
    }
    for name in names:
        assert texts[name] == (ROOT / name).read_bytes()


def test_what_the_program_prints(output: Path, printed: dict[str, str], built: WheelFacts) -> None:
    assert built.path.parent == output
    assert printed == {
        "wheel": str(built.path),
        "version": built.version,
        "sha256": built.sha256,
    }
