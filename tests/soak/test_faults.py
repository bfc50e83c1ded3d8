"""Each fault happens to real processes, links and disks, and is over when it is said to be."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from launcher.session.processes import ProcessIdentity, identify_process
from tests import ROOT
from tests.soak import faults, room
from tests.soak.cluster import Pair, SoakCluster
from tests.soak.faults import Injection, Injector
from tests.soak.schedule import KINDS, Fault
from tests.waiting import wait_for


class Link:
    """A proxy that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.rate, self.delay = 0.0, faults.LINK_DELAY

    def cut(self) -> None:
        self.done.append("cut")

    def freeze(self) -> None:
        self.done.append("freeze")

    def thaw(self) -> None:
        self.done.append("thaw")


class Stage:
    """What faults need of a cluster: one process as supervisor and child of everything."""

    def __init__(self, process: ProcessIdentity | None) -> None:
        self.process = process
        self.proxies = {name: Link() for name in ("worker-0", "worker-1", "worker-2")}
        self.disk = Path()
        self.clocks = self
        self.jumps: list[tuple[str, float]] = []
        self.restarted: list[str] = []

    def pair(self, name: str) -> Pair:
        return Pair(self.process, self.process)

    def restart_supervisor(self, name: str) -> None:
        self.restarted.append(name)

    def set(self, name: str, seconds: float) -> None:
        self.jumps.append((name, seconds))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def begin(stage: Stage, fault: Fault) -> Injector:
    injector = Injector(cast("SoakCluster", stage), time.monotonic)
    injector.begin(fault)
    return injector


def carry_out(stage: Stage, fault: Fault) -> Injection:
    (injection,) = begin(stage, fault).finish()
    return injection


def state_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_there_is_a_way_to_do_each_kind() -> None:
    assert set(faults.HOW) == set(KINDS)


@pytest.mark.parametrize(("kind", "amount"), [("stop worker", 0.0), ("stall", 0.2)])
def test_a_stopped_process_runs_again(
    kind: str, amount: float, sleeper: subprocess.Popen[bytes]
) -> None:
    injector = begin(
        Stage(identify_process(sleeper.pid)),
        Fault(0.0, kind, "worker-0", seconds=0.5, amount=amount),
    )
    wait_for(lambda: state_of(sleeper) == "T", "the process is stopped")
    (injection,) = injector.finish()
    wait_for(lambda: state_of(sleeper) == "S", "the process runs")
    assert injection.healed - injection.began >= 0.5


def test_a_killed_process_is_dead_and_a_supervisor_is_started_again(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SUPERVISOR_DELAY", 0.0)
    stage = Stage(identify_process(sleeper.pid))
    assert not carry_out(stage, Fault(0.0, "kill supervisor", "worker-1", 0.0)).missed
    assert sleeper.wait(30) == -signal.SIGKILL
    assert stage.restarted == ["worker-1"]
    assert (
        carry_out(stage, Fault(0.0, "kill worker", "worker-1", 0.0)).missed == "it had just ended"
    )


def test_a_process_that_is_on_its_way_back_cannot_be_hit() -> None:
    for kind in ("kill worker", "stop worker", "stall", "kill supervisor"):
        assert carry_out(Stage(None), Fault(0.0, kind, "worker-2", 1.0)).missed


def test_links_are_as_they_were_afterwards() -> None:
    stage = Stage(None)
    link = stage.proxies["worker-1"]
    carry_out(stage, Fault(0.0, "cut", "worker-1", 0.0))
    carry_out(stage, Fault(0.0, "silence", "worker-1", 0.01))
    assert link.done == ["cut", "freeze", "thaw"]
    injector = begin(stage, Fault(0.0, "slow link", "worker-1", 0.3, 50e3))
    wait_for(lambda: link.rate == 50e3, "the link is slow")
    injector.finish()
    assert (link.rate, link.delay) == (0.0, faults.LINK_DELAY)


@pytest.mark.parametrize(
    ("target", "cut"),
    [("worker-1", ["worker-1"]), ("coordinator", ["worker-0", "worker-1", "worker-2"])],
)
def test_a_clock_jumps_back_and_connections_are_made_under_the_wrong_time(
    target: str, cut: list[str]
) -> None:
    stage = Stage(None)
    carry_out(stage, Fault(0.0, "clock jump", target, 0.01, -7200.0))
    assert stage.jumps == [(target, -7200.0), (target, 0)]
    assert [name for name, link in stage.proxies.items() if link.done == ["cut"]] == cut


FULL = """
import sys
from pathlib import Path
from tests.soak import faults, room
from tests.soak.schedule import DISK, Fault
from tests.soak.test_faults import Stage

folder = Path(sys.argv[1])
room.mount_small_disk(folder)

class Time:
    now = 0.0
    def monotonic(self):
        return self.now
    def sleep(self, seconds):
        self.now += seconds
        try:
            (folder / "checkpoint").write_bytes(bytes(2**20))
        except OSError as error:
            print(error.strerror)

faults.time = Time()
stage = Stage(None)
stage.disk = folder
faults.HOW["full disk"](stage, Fault(0.0, "full disk", DISK, 0.03))
(folder / "checkpoint").write_bytes(bytes(2**20))
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.skipif(not room.is_possible(), reason="no user namespaces here")
def test_a_full_disk_has_no_byte_left_and_then_all_of_them(tmp_path: Path) -> None:
    enter = [*room.ENTER, sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(enter, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "No space left on device",
        "No space left on device",
        "['checkpoint']",
    ], done.stderr
