"""Role verify: measuring for real on this machine, and one table from the answers."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.recipes.plugins import PLAYBOOKS, load

MEASURE = PLAYBOOKS / "roles/verify/files/measure.py"
RECORDED = Path(__file__).parents[1] / "launcher" / "inventory" / "facts" / "recorded"
measure = load("roles/verify/files/measure.py")
verify = load("filter_plugins/motley_verify.py")


def test_a_folder_is_written_and_read_and_left_clean(tmp_path: Path) -> None:
    """As it is sent to a host: over stdin."""
    done = subprocess.run(
        [sys.executable, "-", "folder", str(tmp_path), "20"],
        input=MEASURE.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["write_ms"] >= 0
    assert answer["read_ms"] >= 0
    assert answer["file_system"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_answer() -> None:
    assert "No such file" in measure.folder("/nowhere/at/all", 20)["error"]


def test_a_folder_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child waits for ever on a pipe nobody writes to, as it would on a dead NFS server."""
    pipe = tmp_path / "pipe"
    subprocess.run(["mkfifo", str(pipe)], check=True)
    monkeypatch.setattr(measure, "CHILD", "import sys; open(sys.argv[1]).read()")
    assert "no answer within 0.3 s" in measure.folder(str(pipe), 0.3)["error"]


def test_a_link_is_measured_both_ways_and_the_listener_ends_by_itself() -> None:
    port = free_port()
    heard: list[dict[str, Any]] = []
    listener = threading.Thread(
        target=lambda: heard.append(measure.listen("127.0.0.1", port, 30, ["127.0.0.1"]))
    )
    listener.start()
    answer = measure.link("127.0.0.1", port, 0.1)
    listener.join(30)
    assert answer["to_mbit_s"] > 0
    assert answer["from_mbit_s"] > 0
    assert answer["round_trip_ms"] >= 0
    assert heard == [{"served": ["127.0.0.1"]}]


def test_a_stranger_is_hung_up_on() -> None:
    port = free_port()
    heard: list[dict[str, Any]] = []
    listener = threading.Thread(
        target=lambda: heard.append(measure.listen("127.0.0.1", port, 2, ["192.0.2.1"]))
    )
    listener.start()
    answer = measure.link("127.0.0.1", port, 0.1)
    listener.join(30)
    assert "error" in answer
    assert heard == [{"served": []}]


def test_a_port_in_use_is_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = measure.listen("127.0.0.1", server.getsockname()[1], 1, ["127.0.0.1"])
    assert "cannot listen on 127.0.0.1" in answer["error"]


def test_the_quickest_exchange_bounds_the_clock() -> None:
    """In a process of its own: Ansible patches sys.intern, which torch does not forgive."""
    code = (
        "from tests.recipes.plugins import load\n"
        "clock = load('action_plugins/motley_clock_offset.py')\n"
        "print(clock.best_offset([(0.0, 3.0, 1.0), (10.0, 12.05, 10.1), (20.0, 26.0, 30.0)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PLAYBOOKS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ast.literal_eval(done.stdout) == {"offset": 2.0, "uncertainty": 0.05}


def host_report(host: str, lspci: str, sha256: str = "ab" * 32, **answers: Any) -> dict[str, Any]:
    text = (RECORDED / lspci).read_text(encoding="utf-8")
    given: dict[str, Any] = {
        "lspci": {"stdout": text},
        "nvidia": {"rc": 2, "msg": "[Errno 2] No such file or directory: b'nvidia-smi'"},
        "driver": {"rc": 2},
        "vulkan": {"rc": 2, "msg": "[Errno 2] No such file or directory: b'vulkaninfo'"},
        "pythons": [{"rc": 2, "msg": "none"}, {"rc": 0, "stdout": "Python 3.11.2"}],
        "installed": json.dumps({"version": "0.1.0", "sha256": sha256}),
        "share": {"stdout": '{"write_ms": 2.5, "read_ms": 1.25, "file_system": "nfs4"}'},
        "link": {"stdout": '{"round_trip_ms": 0.2, "to_mbit_s": 941, "from_mbit_s": 938}'},
        "clock": {"offset": -0.004, "uncertainty": 0.012},
        "synchronized": {"stdout": "yes"},
        "links_skipped": "",
        "allow_software": False,
        "is_coordinator": False,
    }
    return verify.report({"host": host, "system": "Debian 12.15"}, **{**given, **answers})


def read(name: str) -> dict[str, Any]:
    return {"rc": 0, "stdout": (RECORDED / name).read_text(encoding="utf-8")}


def test_one_table_shows_devices_by_pci_address() -> None:
    reports = [
        host_report(
            "intel",
            "lspci-w5700x-pair.txt",
            vulkan=read("vulkaninfo-w5700x-pair.txt"),
            is_coordinator=True,
        ),
        host_report(
            "lambda",
            "lspci-rtx4090-beside-igpu.txt",
            nvidia=read("nvidia-smi-rtx4090.txt"),
            driver={"rc": 0, "stdout": "580.178.04\n"},
            vulkan=read("vulkaninfo-rtx4090-beside-igpu.txt"),
        ),
    ]
    json.dumps(reports)
    assert all(not report["problems"] for report in reports)
    table = "\n".join(verify.table(reports, ["intel", "lambda"]))
    for text in (
        "vulkan 0000:0c:00.0 AMD Radeon Pro W5700X (RADV NAVI10), radv",
        "vulkan 0000:12:00.0 AMD Radeon Pro W5700X",
        "cuda 0000:01:00.0 NVIDIA GeForce RTX 4090 24 GiB driver 580.178.04",
        "vulkan 0000:6b:00.0 AMD Radeon Graphics",
        "0.1.0 abababababab",
        "2.5/1.2 ms nfs4",
        "941/938 Mbit/s 0.2 ms",
        "-4 +- 12 ms",
        "coordinator",
    ):
        assert text in table
    assert "llvmpipe" not in table


def test_what_does_not_work_stands_below_the_table() -> None:
    reports = [
        host_report(
            "intel",
            "lspci-w5700x-pair.txt",
            share={"rc": 1, "stderr": "runuser: user motley does not exist", "stdout": ""},
            links_skipped="a run is active",
            installed="",
            clock={},
            synchronized={"rc": 1},
        ),
        host_report("lambda", "lspci-rtx4090-beside-igpu.txt", link={"msg": ""}),
        host_report("third", "lspci-no-card.txt", sha256="cd" * 32),
    ]
    lines = verify.table(reports, ["intel", "lambda", "third", "gone"])
    text = "\n".join(lines)
    assert "intel: 0000:0c:00.0 Radeon Pro W5700X: Vulkan does not show it" in lines
    assert "intel: runuser: user motley does not exist" in lines
    assert "lambda: no answer" in lines
    assert any("NVIDIA card at 0000:01:00.0 cannot be used" in line for line in lines)
    assert "a run is active" in text
    assert any(line.split()[:3] == ["gone", "no", "report:"] for line in lines)
    assert "the hosts do not have the same wheel: launch cluster push" in lines
    assert max(len(line) for line in lines[:6]) < 160
