"""Virtual environments, the pip that this Python brings along, and what uv reports."""

import subprocess
from pathlib import Path

import pytest

from launcher.errors import LauncherError, PreflightError
from launcher.installation import venvs


def test_its_pip_is_the_one_that_this_python_brings(tmp_path: Path) -> None:
    bundled = venvs.bundled_pip()
    venvs.make_venv(tmp_path / "made")
    command = [tmp_path / "made/bin/python", "-P", bundled / "pip", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == bundled.name.split("-")[1]
    assert str(bundled) in said


def test_a_distribution_keeps_wheels_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", {"WHEEL_PKG_DIR": str(tmp_path)}.get)
    own = tmp_path / "pip-99.0-py3-none-any.whl"
    own.touch()
    assert venvs.bundled_pip() == own


def test_debian_without_its_venv_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", {}.get)
    monkeypatch.setattr(venvs, "find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"lacks the venv module; install python3\.\d+-venv"):
        venvs.bundled_pip()


def test_a_program_that_does_not_end_is_one_line() -> None:
    with pytest.raises(LauncherError, match=r"^sleep did not end within 0 s$"):
        venvs.run_program(["sleep", "600"], 0.01)
