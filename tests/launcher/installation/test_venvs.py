"""Virtual environments, and the pip that this Python brings along."""

import subprocess
from pathlib import Path

import pytest

from launcher.errors import PreflightError
from launcher.installation import venvs


def test_its_pip_is_the_one_that_this_python_brings(tmp_path: Path) -> None:
    bundled = venvs.bundled_pip()
    assert bundled is not None
    venvs.make_venv(tmp_path / "made", with_pip=True)
    command = [tmp_path / "made/bin/python", "-P", "-m", "pip", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == bundled.name.split("-")[1]
    assert str(tmp_path / "made") in said


def test_a_distribution_keeps_wheels_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", {"WHEEL_PKG_DIR": str(tmp_path)}.get)
    own = tmp_path / "pip-99.0-py3-none-any.whl"
    own.touch()
    assert venvs.bundled_pip() == own


def test_debian_without_its_venv_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", {}.get)
    monkeypatch.setattr(venvs, "find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"lacks the venv module; install python3\.\d+-venv"):
        venvs.make_venv(tmp_path / "made", with_pip=True)
    assert not (tmp_path / "made").exists()
