"""What operators may do as root: start, stop and kill units of runs, and nothing else at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "playbooks/roles/trainer/files/motley-unit"
PATH_LINE = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
WORKER = "motley-worker@demo-20261121-130000-7f3a:worker-2.service"
COORDINATOR = "motley-coordinator@demo-20261121-130000-7f3a:coordinator.service"


class Unit:
    """The real script, with its PATH pointed at a systemctl that writes down how it was called."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        systemctl = folder / "systemctl"
        systemctl.write_text(
            f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {self._calls}\n[ ! -e {folder}/fail ] || exit 1\n"
        )
        systemctl.chmod(0o755)
        text = SCRIPT.read_text(encoding="utf-8")
        assert text.count(PATH_LINE) == 1
        self._script = folder / "motley-unit"
        self._script.write_text(text.replace(PATH_LINE, f"PATH={folder}:/usr/bin:/bin\n"))

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = ["sh", str(self._script), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    return Unit(tmp_path)


def test_start_enables_so_that_a_reboot_takes_it_up_again(unit: Unit) -> None:
    assert unit("start", WORKER).returncode == 0
    assert unit.calls == [f"reset-failed {WORKER}", f"--quiet enable --now {WORKER}"]


@pytest.mark.parametrize("name", ["student", "teacher-0", "teacher-12", "evaluator-1"])
def test_what_computes_is_a_worker(unit: Unit, name: str) -> None:
    whole = f"motley-worker@demo-20261121-130000-7f3a:{name}.service"
    assert unit("start", whole).returncode == 0
    assert unit.calls[-1] == f"--quiet enable --now {whole}"


def test_stop_leaves_nothing_of_the_unit(unit: Unit) -> None:
    assert unit("stop", COORDINATOR).returncode == 0
    assert unit.calls == [f"--quiet disable --now {COORDINATOR}", f"reset-failed {COORDINATOR}"]


def test_kill_does_not_ask(unit: Unit) -> None:
    assert unit("kill", WORKER).returncode == 0
    assert unit.calls[0] == f"kill --signal=SIGKILL {WORKER}"
    assert unit.calls[1] == f"--quiet disable --now {WORKER}"


def test_what_systemd_refuses_is_an_error(unit: Unit, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    assert unit("start", WORKER).returncode != 0


@pytest.mark.parametrize(
    "name",
    [
        "ssh.service",
        "motley-worker@.service",
        "motley-worker@:worker-1.service",
        "motley-worker@run:worker-.service",
        "motley-worker@run:worker-1",
        "motley-worker@run:worker-1x.service",
        "motley-worker@run:worker-1.service.service",
        "motley-worker@run:coordinator.service",
        "motley-coordinator@run:worker-1.service",
        "motley-coordinator@run:student.service",
        "motley-worker@run:student-1.service",
        "motley-worker@run:evaluator-0.service.service",
        "motley-worker@run:x:student.service",
        "motley-worker@run:teacher.service",
        "motley-worker@run:evaluator.service",
        "motley-worker@run:teacher-.service",
        "motley-worker@run:teacher-1-2.service",
        "motley-worker@run:teacher-x.service",
        "motley-worker@run:teacher-1:student.service",
        "motley-worker@run:worker-1.timer",
        "motley-worker@-run:worker-1.service",
        "motley-worker@.run:worker-1.service",
        "motley-worker@Run:worker-1.service",
        "motley-worker@../../etc/x:worker-1.service",
        "motley-worker@a@b:worker-1.service",
        "motley-worker@a:b:worker-1.service",
        "motley-worker@run:worker-1.service ssh.service",
        "motley-worker@run:worker-1.service\nssh.service",
        "ssh.service\nmotley-worker@run:worker-1.service",
        "motley-worker@run:worker-1.service;reboot",
        "motley-worker@$(reboot):worker-1.service",
        "motley-worker@`reboot`:worker-1.service",
        "motley-worker@*:worker-1.service",
        "motley-worker@r?n:worker-1.service",
        "motley-worker@[a-z]:worker-1.service",
        "motley-worker@rün:worker-1.service",
        "motley-worker@run\\x2d:worker-1.service",
        "--root=/tmp",
        "-H",
        "",
        " ",
        "motley-worker@" + "r" * 200 + ":worker-1.service",
        "system.slice",
        "/etc/systemd/system/motley-worker@run:worker-1.service",
    ],
)
def test_nothing_but_units_of_runs(unit: Unit, name: str) -> None:
    done = unit("start", name)
    assert done.returncode == 2
    assert done.stderr.startswith("motley-unit: ")
    assert len(done.stderr.splitlines()) == 1
    assert unit.calls == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("start",),
        (WORKER,),
        ("start", WORKER, WORKER),
        ("start", WORKER, "--root=/tmp"),
        ("restart", WORKER),
        ("enable", WORKER),
        ("edit", WORKER),
        ("", WORKER),
        ("start stop", WORKER),
        ("--help", WORKER),
        ("st*", WORKER),
    ],
)
def test_nothing_but_its_three_verbs(unit: Unit, arguments: tuple[str, ...]) -> None:
    done = unit(*arguments)
    assert done.returncode == 2
    assert unit.calls == []


def test_the_environment_of_the_caller_does_not_choose_the_program(tmp_path: Path) -> None:
    """The script as installed: a systemctl earlier in the caller's PATH is never run."""
    mark = tmp_path / "ran"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "systemctl").chmod(0o755)
    subprocess.run(
        ["/bin/sh", str(SCRIPT), "stop", "motley-worker@no-such-run:worker-0.service"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        timeout=20,
    )
    assert not mark.exists()
