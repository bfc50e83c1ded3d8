"""Operations and their results are plain JSON, and a host that does not know one says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.checks import job as job
from launcher.agent.operation import OPERATIONS
from launcher.hosts.local import LocalConnection


@pytest.mark.parametrize("name", ["clock", "machine", "devices"])
def test_answers_survive_json(name: str) -> None:
    found = LocalConnection().call(name, {})
    assert found
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_there_and_refuses_what_it_does_not_know(name: str) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):  # not AttributeError or ImportError
        LocalConnection().call(name, {"no such argument": 1})


def test_a_finding_is_a_mapping(tmp_path: Path) -> None:
    finding = LocalConnection().call("folder", {"path": str(tmp_path), "least": 1})
    assert finding["status"] == "ok"
    asked = {"path": str(tmp_path / "x"), "remedy": "--data FILE"}
    assert LocalConnection().call("data", asked) == {
        "status": "fail",
        "detail": f"{tmp_path / 'x'}: no such data file",
        "remedy": "give --data FILE",
    }


def test_an_unknown_operation_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no operation 'colour' is known here \(known: .*clock"):
        LocalConnection().call("colour", {})


def test_hosts_need_none_of_the_launchers_own_packages() -> None:
    """A host has `motley[coordinator]`; asking must not import what only the laptop has."""
    code = (
        "import sys\n"
        "from launcher.agent.operations import perform_operation\n"
        "perform_operation('data', {'path': '/x', 'remedy': ''})\n"
        "print(*{'ansible', 'cryptography', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
