"""Ends of all kinds: killed and restarted coordinators, SIGTERM, a taken port, a full disk."""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from launcher.cli import run as launch
from launcher.hosts.local import LocalConnection
from launcher.plan.plan import ProcessPlan
from launcher.runs.down import GRACE
from launcher.runs.processes.session import SessionSupervisor
from tests.cluster.real_cluster import STEPS, Cluster
from tests.cluster.real_process import Process, signal_aside
from tests.waiting import PATIENCE, wait_for
from trainer.exchange.coordinator.membership import STOP_PATIENCE

pytestmark = pytest.mark.cluster

SLOW = ("--seconds", "0.005")
IDLE = 20
"""Seconds: more than a busy host takes from a coordinator's start to its third step."""


def assert_same_end(interrupted: Cluster, straight: Cluster) -> None:
    """Compare weights and both moments bit by bit."""
    ours, theirs = interrupted.arrays(), straight.arrays()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name].view(np.uint32), theirs[name].view(np.uint32))


def test_kill_9_of_the_coordinator_and_a_restart(cluster: Cluster) -> None:
    """Workers come back by themselves, and the result is that of a run that never stopped."""
    straight = cluster.another("straight")
    for run in (cluster, straight):
        run.configure(training__epochs=2)
    coordinators = [cluster.coordinator(2), straight.coordinator(2)]
    gate = cluster.folder / "gate"
    gated = (*SLOW, "--gate", f"10:{gate}")  # at the eleventh step, so no checkpoint is left out
    workers = [cluster.worker(0, *gated), cluster.worker(1, *SLOW)]
    workers += [straight.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_event("checkpoint", step=8)
    cluster.wait_step(10)
    coordinators[0].kill()
    gate.touch()
    died_at = cluster.step
    coordinators.append(cluster.coordinator(2))
    resumed = cluster.wait_event("resumed")
    assert resumed["step"] == max(
        event["step"] for event in cluster.events("checkpoint") if event["step"] <= died_at
    )
    codes = [process.wait() for process in (*coordinators[1:], *workers)]
    assert codes == [0] * 6
    for run in (cluster, straight):
        run.check_contracts([0, 1])
    assert_same_end(cluster, straight)


def test_kill_9_before_the_first_checkpoint(cluster: Cluster) -> None:
    """The run begins again, and the steps of its first life are void: no sample counts twice."""
    cluster.configure(checkpoint__every=1000)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    coordinator.kill()
    again = cluster.coordinator(2)
    assert [process.wait() for process in (again, *workers)] == [0, 0, 0]
    assert [event["step"] for event in cluster.events("resumed")] == [0]
    cluster.check_contracts([0, 1])


def test_a_killed_coordinator_leaves_no_temporary_file(cluster: Cluster, tmp_path: Path) -> None:
    """What it starts workers of its own with has no name, and is gone with it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags = ["--role", "coordinator", "--bind", cluster.address, "--expect-workers", "1"]
    local = ["--gpus", "cpu", "--gpu-backend", "cpu", "--threads", "1"]
    coordinator = cluster.trainer("coordinator", *flags, *local, TMPDIR=str(temporary))
    cluster.wait_event("joined", rank=0)
    coordinator.kill()
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]  # torch's own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_saves_and_a_later_start_goes_on(cluster: Cluster, number: signal.Signals) -> None:
    straight = cluster.another("straight")
    first = [straight.coordinator(2), *(straight.worker(rank) for rank in (0, 1))]
    stopped = [cluster.coordinator(2), *(cluster.worker(rank, *SLOW) for rank in (0, 1))]
    cluster.wait_step(5)
    stopped[0].signal(number)
    assert [process.wait() for process in stopped] == [0, 0, 0]
    status = cluster.status
    assert status["step"] < STEPS
    assert status["checkpoint"]["step"] == status["step"]
    assert number.name in status["reason"]
    again = [cluster.coordinator(2), *(cluster.worker(rank) for rank in (0, 1))]
    assert [process.wait() for process in (*again, *first)] == [0] * 6
    cluster.check_contracts([0, 1])
    assert_same_end(cluster, straight)


@pytest.mark.smoke("resume")
def test_a_stop_saves_the_last_commit_while_a_step_takes_long(cluster: Cluster) -> None:
    """Killed in the middle of the step that it waits for, it has lost no commit."""
    cluster.configure(checkpoint__every=1000)
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, "--stall", "5:600")
    cluster.wait_step(5)
    coordinator.signal(signal.SIGTERM)
    assert cluster.wait_event("checkpoint")["step"] == 5
    coordinator.kill()
    worker.kill()
    again = [cluster.coordinator(1), cluster.worker(0)]
    assert cluster.wait_event("resumed")["step"] == 5
    assert [process.wait() for process in again] == [0, 0]
    cluster.check_contracts([0])


def test_a_stop_does_not_wait_for_a_step_without_end(cluster: Cluster) -> None:
    cluster.configure(checkpoint__every=1000, exchange__step_deadline=PATIENCE)
    coordinator = cluster.coordinator(1)
    cluster.worker(0, "--stall", "5:600")
    cluster.wait_step(5)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert cluster.status["checkpoint"]["step"] == cluster.step == 5
    assert "step 6 was not finished in time and is skipped" in cluster.status["reason"]
    assert cluster.events("stopped")


def test_down_loses_no_commit_when_a_step_takes_longer_than_the_grace(cluster: Cluster) -> None:
    """A coordinator that is killed while it waits for its step has saved what was committed."""
    cluster.configure(checkpoint__every=1000)
    command = [sys.executable, "-P", "-m", "trainer.cli", "finetune"]
    command += ["--config", str(cluster.run_file), "--run-id", cluster.run_id]
    command += ["--role", "coordinator", "--bind", cluster.address, "--expect-workers", "1"]
    plan = ProcessPlan(
        name="coordinator",
        role="coordinator",
        rank=0,
        local_rank=0,
        host="localhost",
        device="cpu",
        backend="cpu",
        threads=1,
        address=cluster.address,
        argv=tuple(command),
        env={"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        folder=str(cluster.folder / "processes" / "coordinator"),
        certificate_names=(),
    )
    supervisor = SessionSupervisor(LocalConnection(), cluster.run_id, grace=STOP_PATIENCE / 10)
    supervisor.start_process(plan)
    try:
        cluster.wait_event("listening")
        worker = cluster.worker(0, "--stall", "5:600")
        cluster.wait_step(5)
    finally:
        supervisor.stop_processes([plan], GRACE)
    ended = supervisor.read_state(plan)
    assert (ended.state, ended.signal) == ("stopped", signal.SIGKILL)
    worker.kill()
    again = [cluster.coordinator(1), cluster.worker(0)]
    assert cluster.wait_event("resumed")["step"] == 5
    assert [process.wait() for process in again] == [0, 0]
    cluster.check_contracts([0])


def test_sigterm_to_a_worker_lets_it_leave(cluster: Cluster) -> None:
    cluster.configure(training__epochs=2)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 0
    assert "SIGTERM" in cluster.wait_event("lost", rank=1)["reason"]
    assert [coordinator.wait(), workers[0].wait()] == [0, 0]
    cluster.check_contracts([0])


def test_sigterm_in_the_moment_before_a_worker_waits_is_not_lost(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(2)  # so the only worker waits for another one
    worker = cluster.worker(0)
    cluster.wait_event("joined", rank=0)
    signal_aside(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0


@pytest.mark.smoke("refuse")
def test_a_port_in_use(cluster: Cluster) -> None:
    """One line and exit code 2; nothing is started, and the one who has the port goes on."""
    first = cluster.coordinator(1)
    second = cluster.another("second")
    second.port = cluster.port
    refused = second.coordinator(1, "--gpus", "0", "--gpu-backend", "cpu", listening=False)
    assert refused.wait() == 2
    complaint = refused.text.strip().splitlines()[-1]
    assert complaint.startswith(f"trainer: --bind {cluster.address}: ")
    assert "in use" in complaint
    assert "Traceback" not in refused.text
    assert not second.events("joined")
    worker = cluster.worker(0)
    assert [first.wait(), worker.wait()] == [0, 0]


@pytest.mark.smoke("refuse")
def test_plaintext_stays_on_this_machine(cluster: Cluster) -> None:
    """TEST-NET-1 is no loopback: refused before anything is bound."""
    flags = ("--role", "coordinator", "--bind", "192.0.2.1:9000")
    process = cluster.trainer("coordinator", *flags)
    assert process.wait() == 2
    assert "TLS" in process.text
    assert "Traceback" not in process.text


SMALL_FILES = {resource.RLIMIT_FSIZE: 100_000}
"""A file may have 100 kB, less than a checkpoint needs."""


def test_a_full_disk_that_is_cleared(cluster: Cluster) -> None:
    """An alarm, training goes on, and the next checkpoint is saved: exit code 0."""
    cluster.configure(training__epochs=2, checkpoint__every=STEPS)
    cluster.limits = SMALL_FILES
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, "--seconds", "0.02")
    alarm = cluster.wait_event("alarm")
    assert "checkpoint not saved" in alarm["reason"]
    wait_for(lambda: cluster.status["reason"] == alarm["reason"], "the status tells the alarm")
    limit_files(coordinator, resource.RLIM_INFINITY)
    cluster.wait_event("checkpoint")
    assert [coordinator.wait(), worker.wait()] == [0, 0]
    assert "ALARM" in coordinator.text
    cluster.check_contracts([0])


def test_a_disk_that_stays_full(cluster: Cluster) -> None:
    """The second save in a row that fails halts the run, and not the end of a long one."""
    cluster.configure(training__epochs=50)
    cluster.limits = SMALL_FILES
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, *SLOW)
    assert [coordinator.wait(), worker.wait()] == [6, 6]
    assert len(cluster.events("alarm")) >= 2
    halted = cluster.events("halted")[0]["reason"]
    assert "checkpoint not saved" in halted
    assert "the second save in a row" in halted
    assert (cluster.status["state"], cluster.status["reason"]) == ("failed", halted)
    assert "Traceback" not in coordinator.text
    assert not list((cluster.output / "checkpoints").glob("*step-*"))


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_to_go_on_from(cluster: Cluster) -> None:
    cluster.configure(training__epochs=3)
    coordinator = cluster.coordinator(1)
    gate = cluster.folder / "gate"
    worker = cluster.worker(0, *SLOW, "--gate", f"9:{gate}")  # the tenth step
    cluster.wait_event("checkpoint", step=8)
    limit_files(coordinator, 100_000)
    gate.touch()
    assert [coordinator.wait(), worker.wait()] == [6, 6]
    saved = cluster.events("checkpoint")[-1]["step"]
    first, second = (event["step"] for event in cluster.events("alarm"))
    assert saved < first < second  # not always the next two: a slow disk leaves one out
    again = [cluster.coordinator(1), cluster.worker(0)]
    assert [process.wait() for process in again] == [0, 0]
    assert cluster.wait_event("resumed")["step"] == saved
    cluster.check_contracts([0])


def limit_files(process: Process, size: int) -> None:
    """Let a running process write files of at most so many bytes."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_coordinator_that_was_suspended_expels_no_worker(cluster: Cluster) -> None:
    """It heard nobody while it was stopped, like a laptop that was closed: all may stay."""
    cluster.configure(training__epochs=2, exchange__heartbeat=0.2, exchange__lost_after=2.0)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    coordinator.signal(signal.SIGSTOP)
    woken = time.monotonic() + 2.7  # more than lost_after, less than the workers' own limit
    wait_for(lambda: time.monotonic() > woken, "time passes")
    coordinator.signal(signal.SIGCONT)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert not cluster.events("lost")
    cluster.check_contracts([0, 1])


def test_hanging_workers_end_a_run_after_idle_stop_and_two_hosts_add_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = {"head": 36.0, "rack": 72.0}
    hosts = [
        {"name": name, "price_hour": price, "ranks": [rank]}
        for rank, (name, price) in enumerate(prices.items())
    ]
    state = cluster.folder / "state"
    budget = {"currency": "EUR", "idle_stop": f"{IDLE}s", "hosts": hosts}
    cluster.configure(
        training__epochs=100_000, budget={**budget, "ledger": str(state / "spend.jsonl")}
    )
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    assert coordinator.wait() == 9
    (stopped,) = cluster.events("stopped")
    assert stopped["reason"].startswith("budget.idle_stop: no step was completed for ")
    assert cluster.events("checkpoint")[-1]["step"] == cluster.step

    def spent(by: str) -> dict[str, dict[str, float]]:
        assert launch(["spend", "--by", by, "--json"]) == 0
        return {total["name"]: total for total in json.loads(capsys.readouterr().out)["totals"]}

    monkeypatch.setenv("MOTLEY_STATE_DIR", str(state))
    (whole,) = spent("run").values()
    each = spent("host")
    assert list(each) == list(prices)
    for name, price in prices.items():
        assert each[name]["cost"] == pytest.approx(each[name]["seconds"] * price / 3600)
        assert each[name]["seconds"] == pytest.approx(whole["seconds"] / 2)
        assert each[name]["seconds"] >= IDLE
    assert whole["name"] == "run"
    for parts in (each, spent("day")):
        assert sum(part["cost"] for part in parts.values()) == pytest.approx(whole["cost"])
