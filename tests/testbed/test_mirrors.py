"""What hosts take over from this machine's apt and pip; needs neither root nor hosts."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.testbed import requirements
from tests.testbed.errors import LabError
from tests.testbed.mirrors import PIP_CERTIFICATES, pip_configuration


def settings(text: str) -> dict[str, list[str]]:
    """Return the [global] settings of a pip.conf, each as its words."""
    config = configparser.RawConfigParser()
    config.read_string(text)
    return {name: value.split() for name, value in config["global"].items()}


def test_local_places_are_bound_and_named_alike(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "mirror/simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    pip = pip_configuration(
        f"global.find-links='{wheels}\\nhttps://example.org/wheels'\n"
        f"global.extra-index-url='{index.as_uri()}'\n"
        "global.timeout='5'\n"
    )
    assert settings(pip.text) == {
        "find-links": [str(wheels), "https://example.org/wheels"],
        "extra-index-url": [index.as_uri()],
    }
    # The pages of an index point beside it.
    assert pip.folders == (index.parent, wheels)
    assert pip.certificates is None


def test_the_environment_wins_and_certificates_are_copied() -> None:
    pip = pip_configuration(
        ":env:.cert='/etc/ssl/mine.pem'\n"
        ":env:.index-url='https://pypi.org/simple'\n"
        "global.cert='/etc/ssl/other.pem'\n"
        "global.index-url='https://files.pythonhosted.org/simple'\n"
    )
    assert settings(pip.text)["index-url"] == ["https://pypi.org/simple"]
    assert settings(pip.text)["cert"] == [str(PIP_CERTIFICATES)]
    assert pip.certificates == Path("/etc/ssl/mine.pem")
    assert pip.folders == ()


def test_a_setting_that_cannot_be_read_is_named() -> None:
    with pytest.raises(LabError, match=r"cannot read 'global\.find-links="):
        pip_configuration("global.find-links=[unclosed")


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.shutil, "which", lambda program: None)
    monkeypatch.setattr(requirements, "missing_rights", lambda: None)
    complaint = requirements.complaint()
    assert complaint is not None
    assert complaint.startswith("no test bed: ")
    for package in ("mmdebstrap", "systemd-container", "slirp4netns"):
        assert package in complaint.partition("apt-get install")[2]


def test_the_list_of_packages_needs_no_environment() -> None:
    command = [sys.executable, "-S", "-m", "tests.testbed.requirements"]  # -S: no packages
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout.count("\n") == 1
