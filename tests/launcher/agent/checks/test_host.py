"""What is found out about a host, and what to do about it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.checks.host import (
    check_cuda,
    check_devices,
    check_folder,
    check_port,
    check_secure_boot,
    check_sleep,
    check_trainer,
    check_trainer_cuda,
    find_python,
)


@pytest.mark.needs("ss")
def test_a_port_in_use_names_its_owner_and_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = check_port("127.0.0.1", port)
        assert finding.status == "fail"
        assert f"port {port} on 127.0.0.1 is in use" in finding.detail
        assert f"(pid {os.getpid()})" in finding.detail
        assert f"motley_port={port + 1}" in finding.remedy
    assert check_port("127.0.0.1", port).status == "ok"


@pytest.mark.needs("ss")
def test_a_port_of_a_run_is_not_advised_to_be_ended() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        " print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    words = ["--run-id", "tune-1", "--role", "coordinator"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        finding = check_port("127.0.0.1", int(process.stdout.readline()))
        process.communicate()
    assert f"by the coordinator of run tune-1 (pid {process.pid})" in finding.detail
    assert "launch status --run tune-1" in finding.remedy
    assert "stop that process" not in finding.remedy


def test_an_address_of_another_machine_is_said() -> None:
    finding = check_port("192.0.2.1", 9000)  # TEST-NET-1, RFC 5737
    assert "not an address of this host" in finding.detail


def test_folders(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "to" / "be" / "made", 1).status == "ok"
    assert "are needed" in check_folder(tmp_path, 1 << 62).detail
    (tmp_path / "file").touch()
    assert "is not a folder" in check_folder(tmp_path / "file" / "below", 1).detail


def test_a_trainer_that_is_not_there() -> None:
    assert "not an executable" in check_trainer("/no/such/trainer", own=False).detail
    assert check_trainer("/bin/sh", own=False).status == "ok"


def test_devices_that_do_not_work_are_never_passed_over() -> None:
    finding = check_devices(["cpu"], ["NVIDIA card at 0000:01:00.0 cannot be used: no driver"])
    assert finding.status == "fail"
    assert "no driver" in finding.detail
    assert check_devices(["cpu", "cpu"], []).detail == "2 x cpu"
    spare = check_devices(["cpu"], [], ["wgpu 0000:0b:00.0 (W5700X)"]).detail
    assert spare == "cpu; not used: wgpu 0000:0b:00.0 (W5700X)"


def stand_in_python(folder: Path, code: str) -> str:
    """Write a program that stands in for a trainer's Python and runs its own code."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
    python.chmod(0o700)
    return str(python)


def test_torch_must_see_every_planned_card(tmp_path: Path) -> None:
    cards = ["GPU-1", "GPU-2"]
    counting = "print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    assert check_cuda(stand_in_python(tmp_path, counting), cards).status == "ok"
    finding = check_cuda(stand_in_python(tmp_path, "print(1)"), cards)
    assert finding.status == "fail"
    assert finding.detail == "torch sees 1 of 2 cards (GPU-1, GPU-2)"
    assert "motley_devices=[{backend: cpu}]" in finding.remedy
    finding = check_cuda(stand_in_python(tmp_path, "sys.exit('warning\\nno kernel image')"), cards)
    assert (finding.status, finding.detail) == ("fail", "no kernel image")
    assert check_cuda(str(tmp_path / "absent"), cards).status == "fail"
    assert check_cuda(None, cards).status == "warn"


@pytest.mark.long
def test_the_torch_of_this_environment_is_really_asked() -> None:
    """On a machine without CUDA it says so; with CUDA, it does not know a card of this name."""
    finding = check_cuda(sys.executable, ["GPU-00000000-0000-0000-0000-000000000000"])
    assert finding.status == "fail"
    assert "without CUDA" in finding.detail or "torch sees 0 of 1 cards" in finding.detail


def test_the_python_of_a_trainer_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "trainer").touch(mode=0o700)
    assert find_python(str(tmp_path / "trainer")) is None
    python = stand_in_python(tmp_path, "")
    assert find_python(str(tmp_path / "trainer")) == python
    assert find_python(str(tmp_path / "absent")) is None


def test_a_coordinator_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.checks.host.MODULES", ("torch", "no_such_module"))
    assert check_trainer("/bin/sh", own=True).detail == "not installed: no_such_module"
    assert check_trainer("/bin/sh", own=True, trains=False).status == "ok"


def test_the_trainers_own_python_is_asked_for_cards(tmp_path: Path) -> None:
    (tmp_path / "trainer").touch(mode=0o700)
    stand_in_python(tmp_path, "print(1)")
    assert check_trainer_cuda(str(tmp_path / "trainer"), False, ["GPU-1"]).status == "ok"


@pytest.mark.parametrize(
    ("state", "broken", "status"),
    [("on", True, "warn"), ("on", False, "ok"), ("off", True, "ok"), ("unknown", True, "ok")],
)
def test_secure_boot_is_a_reason_only_where_a_card_does_not_work(
    monkeypatch: pytest.MonkeyPatch, state: str, broken: bool, status: str
) -> None:
    monkeypatch.setattr("launcher.inventory.facts.machine.secure_boot", lambda: state)
    assert check_secure_boot(broken).status == status


@pytest.mark.parametrize(("sleeps", "status"), [(True, "warn"), (False, "ok")])
def test_a_machine_that_may_fall_asleep(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, status: str
) -> None:
    monkeypatch.setattr("launcher.inventory.facts.machine.may_sleep", lambda: sleeps)
    assert check_sleep().status == status
