"""Role verify: measuring for real on this machine, and one table from the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.inventory.facts.devices import Detection, Device, detect_devices
from launcher.inventory.facts.pci import parse_lspci
from tests import ROOT
from tests.ports import free_port
from tests.recipes.plugins import load

RECORDED = Path(__file__).parents[1] / "launcher" / "inventory" / "facts" / "recorded"
verify = load("filter_plugins/motley_verify.py")


def ask(*words: str | dict[str, Any]) -> subprocess.Popen[str]:
    """Start the agent's code as a host runs it: over stdin, on a Python without Motley."""
    python = Path(sys.base_prefix, "bin", "python3")
    texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
    asked = subprocess.Popen(
        [python, "-I", "-", *texts],
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asked.stdin is not None
    with asked.stdin:
        asked.stdin.write(verify.agent_script())
    asked.stdin = None
    return asked


def answer_of(asked: subprocess.Popen[str]) -> dict[str, str]:
    """Return what Ansible registers of a command."""
    stdout, stderr = asked.communicate(timeout=60)
    return {"stdout": stdout, "stderr": stderr}


def test_a_share_is_written_and_read_and_left_clean(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    answer = answer_of(ask("share", {"path": str(tmp_path), "deadline": 20}))
    (report,) = [host_report("a", share=answer)]
    assert report["share"]["status"] in ("ok", "warn")
    assert "a durable file in" in report["share"]["detail"]
    assert [*(tmp_path / "checkpoints").iterdir()] == []


def test_a_link_is_measured_both_ways_and_the_listener_ends_by_itself() -> None:
    target = {"address": "127.0.0.1", "port": free_port(), "token": "one of this play"}
    listener = ask("listen", {**target, "peers": ["lambda"], "deadline": 30})
    answer = answer_of(ask("connect", {**target, "name": "lambda", "deadline": 30}))
    assert json.loads(answer_of(listener)["stdout"])["connected"] == ["lambda"]
    link = host_report("lambda", link=answer)["link"]
    assert link["to_mbit_s"] > 0
    assert link["from_mbit_s"] > 0
    assert link["round_trip_ms"] >= 0


def test_a_link_that_is_refused_is_an_error_of_its_host() -> None:
    target = {"address": "127.0.0.1", "port": free_port(), "token": "one of this play"}
    answer = answer_of(ask("connect", {**target, "name": "lambda", "deadline": 0.1}))
    report = host_report("lambda", link=answer)
    assert report["link"] == {"error": "link refused: connection refused"}


def test_a_request_that_cannot_be_answered_ends_with_one_line() -> None:
    answer = answer_of(ask("listen", {"address": "localhost"}))
    assert answer["stderr"].startswith("listen: ")
    assert answer["stderr"].count("\n") == 1


def measure_clock(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the role's action on this machine, as Ansible does."""
    program = [sys.executable, "-m", "ansible", "adhoc", "-i", "localhost,", "-c", "local"]
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_HOME": str(tmp_path)}
    return subprocess.run(
        [*program, "-o", "-m", "motley_clock_offset", "localhost"],
        cwd=ROOT,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_role_measures_the_clock_over_ansibles_connection(tmp_path: Path) -> None:
    done = measure_clock(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.partition("=> ")[2])
    assert answer["changed"] is False
    assert answer["uncertainty"] > 0
    assert abs(answer["offset"]) <= answer["uncertainty"] + 0.001


def test_a_host_without_a_clock_is_refused_with_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "date"
    broken.write_text("#!/bin/sh\necho Sunday\n")
    broken.chmod(0o755)
    done = measure_clock(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "the host does not report its time" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def detect(
    folder: Path, lspci: str, *, nvidia: tuple[int, str] = (127, ""), vulkaninfo: str = ""
) -> dict[str, str]:
    """Return the answer of a host whose cards and programs are the recorded ones."""
    text = (RECORDED / lspci).read_text(encoding="utf-8")
    for card in parse_lspci(text):
        pci = folder / "pci" / card.address
        (pci / "drm" / "renderD128").mkdir(parents=True)
        for name in ("vendor", "device"):
            (pci / name).write_text(f"0x{getattr(card, name)}\n")
        (pci / "class").write_text("0x030000\n")
    code, output = nvidia
    answers = {"lspci": (0, text), "nvidia-smi": (code, output and recorded(output))}
    if vulkaninfo:
        answers["vulkaninfo"] = (0, recorded(vulkaninfo))
    found = detect_devices(lambda argv: answers.get(argv[0], (127, "")), folder / "pci")
    return {"stdout": json.dumps(asdict(found))}


def host_report(host: str, sha256: str = "ab" * 32, **answers: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "devices": {"stdout": json.dumps(asdict(Detection((Device("cpu", "cpu"),))))},
        "driver": {"rc": 2},
        "pythons": [{"rc": 2, "msg": "none"}, {"rc": 0, "stdout": "Python 3.11.2"}],
        "installed": json.dumps({"version": "0.1.0", "sha256": sha256}),
        "share": {"stdout": json.dumps({"status": "ok", "detail": "/srv, 12 ms", "remedy": ""})},
        "link": {
            "stdout": json.dumps({"round_trip": 2e-4, "upload_rate": 941e6, "download_rate": 938e6})
        },
        "clock": {"offset": -0.004, "uncertainty": 0.012},
        "synchronized": {"stdout": "yes"},
        "links_skipped": "",
        "allow_software": False,
        "is_coordinator": False,
    }
    return verify.report({"host": host, "system": "Debian 12.15"}, **{**given, **answers})


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def test_devices_are_those_that_discovery_finds() -> None:
    answer = answer_of(ask("devices", {"allow_software": False}))
    report = host_report("a", devices=answer)
    found = detect_devices()
    assert [one["id"] for one in report["devices"]] == [one.id for one in found.devices]
    assert report["problems"] == [*found.problems, *found.vulkan_problems]


def test_one_table_shows_devices_by_pci_address(tmp_path: Path) -> None:
    reports = [
        host_report(
            "intel",
            devices=detect(
                tmp_path / "intel",
                "lspci-w5700x-pair.txt",
                vulkaninfo="vulkaninfo-w5700x-pair.txt",
            ),
            is_coordinator=True,
        ),
        host_report(
            "lambda",
            devices=detect(
                tmp_path / "lambda",
                "lspci-rtx4090-beside-igpu.txt",
                nvidia=(0, "nvidia-smi-rtx4090.txt"),
                vulkaninfo="vulkaninfo-rtx4090-beside-igpu.txt",
            ),
            driver={"rc": 0, "stdout": "580.178.04\n"},
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
        "lambda: share /srv, 12 ms",
        "941/938 Mbit/s 0.2 ms",
        "-4 +- 12 ms",
        "coordinator",
    ):
        assert text in table
    assert "llvmpipe" not in table


def test_what_does_not_work_stands_below_the_table(tmp_path: Path) -> None:
    no_driver = (9, "nvidia-smi-no-driver.txt")
    both = detect(tmp_path / "lambda", "lspci-rtx4090-beside-igpu.txt", nvidia=no_driver)
    reports = [
        host_report(
            "intel",
            devices=detect(tmp_path / "intel", "lspci-w5700x-pair.txt"),
            share={"rc": 1, "stderr": "runuser: user motley does not exist", "stdout": ""},
            links_skipped="a run is active",
            installed="",
            clock={},
            synchronized={"rc": 1},
        ),
        host_report("lambda", devices=both, link={"msg": ""}),
        host_report("third", sha256="cd" * 32, devices={"stderr": "needs Python 3.11"}),
        host_report("fourth", devices={"stdout": '{"cards": []}'}),
    ]
    lines = verify.table(reports, ["intel", "lambda", "third", "fourth", "gone"])
    text = "\n".join(lines)
    assert any(line.startswith("intel: 0000:0c:00.0 Radeon Pro W5700X ") for line in lines)
    assert "third: devices: needs Python 3.11" in lines
    assert "fourth: devices: devices: Field required" in lines
    assert not any(line.startswith("third ") and "cpu only" in line for line in lines)
    assert "intel: runuser: user motley does not exist" in lines
    assert "lambda: no answer" in lines
    assert any("NVIDIA card at 0000:01:00.0 cannot be used" in line for line in lines)
    assert "a run is active" in text
    assert any(line.split()[:3] == ["gone", "no", "report:"] for line in lines)
    assert "the hosts do not have the same wheel: launch cluster push" in lines
    assert max(len(line) for line in lines[:7]) < 160
