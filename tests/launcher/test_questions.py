"""Questions and answers are plain JSON, and a host that does not know one says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.hosts.queries import answer


@pytest.mark.parametrize("name", ["clock", "machine", "devices"])
def test_answers_survive_json(name: str) -> None:
    found = answer(name, {})
    assert found
    assert json.loads(json.dumps(found)) == found


def test_a_finding_is_a_mapping(tmp_path: Path) -> None:
    finding = answer("folder", {"path": str(tmp_path), "least": 1})
    assert finding["status"] == "ok"
    assert answer("data", {"path": str(tmp_path / "x"), "remedy": "--data FILE"}) == {
        "status": "fail",
        "detail": f"{tmp_path / 'x'}: no such file or directory",
        "remedy": "give --data FILE",
    }


def test_an_unknown_question_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no question 'colour' is known here \(known: clock"):
        answer("colour", {})


def test_hosts_need_none_of_the_launchers_own_packages() -> None:
    """A host has `motley[coordinator]`; asking must not import what only the laptop has."""
    code = (
        "import sys\n"
        "from launcher.hosts.queries import answer\n"
        "answer('data', {'path': '/x', 'remedy': ''})\n"
        "print(*{'ansible', 'fabric', 'paramiko', 'cryptography', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
