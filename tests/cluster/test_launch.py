"""`launch` with real processes and a stand-in trainer: start, watch, fail, stop, leave nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.session.processes import identify_process
from tests.cluster.real_process import signal_aside
from tests.cluster.stand_in_cluster import LAUNCH, Cluster, cluster
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]
CARD = "\ntook no time\nnext:\n  trainer x\n"
"""Of the stand-in."""


@pytest.mark.smoke("start")
def test_up_status_logs_down(cluster: Cluster) -> None:
    done = cluster.up("--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["schema"], tree["state"]) == ("motley.cluster.status/2", "running")
    assert tree["joined"] == [0, 1]
    assert [process["state"] for process in tree["processes"]] == ["running"] * 3
    for process in tree["processes"]:
        assert identify_process(process["pid"]) is not None
        key = Path(process["folder"]) / "tls" / "key.pem"
        assert key.stat().st_mode & 0o777 == 0o600
    assert not list(cluster.state.rglob("processes/*/ca-key.pem"))

    status = cluster.launch("status")
    assert f"{tree['run_id']}: running, step" in status.stdout
    assert "worker-1" in status.stdout
    assert cluster.launch("logs", "worker-1").stdout == "worker-1 here, work \n"
    both = cluster.launch("logs", "worker-0", "coordinator", "--tail", "1")
    assert both.stdout.splitlines() == [
        "worker-0    | worker-0 here, work ",
        "coordinator | coordinator here, work ",
    ]
    wrong = cluster.launch("logs", "worker-7")
    assert wrong.returncode == 2
    assert "no process worker-7 (there are: coordinator, worker-0, worker-1)" in wrong.stderr
    wrong = cluster.launch("logs", "worker-0", "--attempt", "9")
    assert "no attempt 9 (there are: 1)" in wrong.stderr

    again = cluster.up()
    assert again.returncode == 4
    assert f"the cluster is busy: run {tree['run_id']} is running" in again.stderr
    assert cluster.status()["state"] == "running"

    down = cluster.launch("cluster", "down")
    assert down.returncode == 0
    assert "stopped coordinator, worker-0, worker-1" in down.stdout
    assert "no process is left" in down.stdout
    assert cluster.living() == []
    assert cluster.launch("cluster", "down").stdout == "nothing was running\n"
    assert cluster.status()["state"] == "stopped"
    step = cluster.status()["training"]["step"]
    said = f"{tree['run_id']}: stopped at {step}/10, loss 1.0000"
    assert said in cluster.launch("status").stdout
    assert f"stopped at {step}/10" in cluster.launch("runs").stdout
    runs = json.loads(cluster.launch("runs", "--json").stdout)["runs"]
    assert [(run["run_id"], run["live"]) for run in runs] == [(tree["run_id"], False)]


@pytest.mark.smoke("start")
def test_wait_follows_to_the_end_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.behave(steps=3)
    done = cluster.up("--wait", "--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["state"], tree["live"]) == ("completed", False)
    assert f"{tree['run_id']}: completed, step 3/10" in cluster.launch("status").stdout
    assert {process["state"] for process in tree["processes"]} == {"exited"}
    assert cluster.living() == []
    assert cluster.launch("status").stdout.endswith(CARD)
    again = cluster.up("--wait")  # the next one may start
    assert again.returncode == 0
    assert again.stdout.endswith(CARD)


@pytest.mark.smoke("kill")
def test_a_job_that_fails_is_reported_with_its_last_lines(cluster: Cluster) -> None:
    cluster.behave(coordinator="exit 5")
    done = cluster.up("--wait")
    assert done.returncode == 6
    assert "coordinator ended (exit code 5)" in done.stderr
    assert "coordinator: something specific is wrong" in done.stderr
    assert cluster.living() == []


def test_a_worker_that_is_refused_is_named_and_everything_is_stopped(cluster: Cluster) -> None:
    cluster.behave(worker_1="exit 4")
    done = cluster.up()
    assert done.returncode == 5
    assert "missing: worker-1 (failed, exit code 4); everything was stopped" in done.stderr
    assert "worker-1: something specific is wrong" in done.stderr
    assert cluster.living() == []
    why = "1 of 2 workers have joined; missing: worker-1 (failed, exit code 4);"
    why += " everything was stopped"
    status = cluster.status()
    assert (status["state"], status["reason"]) == ("failed", why)
    assert f": failed: {why}" in cluster.launch("status").stdout
    cluster.launch("cluster", "down")  # which ends nothing, and takes the reason from nobody
    assert " failed: 1 of 2 workers have joined; " in cluster.launch("runs").stdout
    cluster.behave()
    assert cluster.up("--resume", status["run_id"]).returncode == 0
    assert cluster.status()["state"] == "running"


def test_a_worker_that_never_joins_is_named_at_the_deadline(cluster: Cluster) -> None:
    cluster.behave(worker_0="never join")
    done = cluster.up("--timeout", "3")
    assert done.returncode == 5
    assert "1 of 2 workers have joined within 3 s; missing: worker-0 (running)" in done.stderr
    assert "worker-0 here, never join" in done.stderr
    assert cluster.living() == []


@pytest.mark.smoke("refuse")
def test_a_port_in_use_starts_nothing(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", cluster.port)):
        done = cluster.up()
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert f"port {cluster.port} on 127.0.0.1 is in use" in done.stderr
    assert cluster.runs() == []


@pytest.mark.smoke("refuse")
def test_a_missing_model_or_too_few_devices_start_nothing(cluster: Cluster) -> None:
    done = cluster.up("--model", str(cluster.folder / "absent"))
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "no model folder" in done.stderr
    done = cluster.up("-e", "motley_fill_with_cpu=false")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "2 workers are expected, but the inventory has 1 devices" in done.stderr
    assert cluster.runs() == []


def test_of_two_starts_at_once_one_wins(cluster: Cluster) -> None:
    starts = [cluster.open(cluster.up_command()) for _ in range(3)]
    errors = [start.communicate()[1] for start in starts]
    codes = sorted(start.wait() for start in starts)
    assert codes == [0, 4, 4], errors
    for start, error in zip(starts, errors, strict=True):
        if start.returncode:
            assert "another launch is starting a run" in error or "cluster is busy" in error
    assert len(cluster.runs()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_is_undone(cluster: Cluster, number: int) -> None:
    cluster.behave(worker_0="never join")
    start = cluster.open(cluster.up_command())
    wait_for(lambda: len(cluster.living()) >= 6, "three supervisors and their children")
    os.kill(start.pid, number)
    _, error = start.communicate()
    assert start.returncode == 130
    assert "interrupted" in error
    assert cluster.living() == []


@pytest.mark.smoke("down")
def test_a_killed_launcher_leaves_a_run_that_down_ends(cluster: Cluster) -> None:
    cluster.behave(worker_0="never join")
    start = cluster.open(cluster.up_command())
    wait_for(lambda: len(cluster.living()) >= 6, "three supervisors and their children")
    start.send_signal(signal.SIGKILL)
    start.communicate()
    assert cluster.status()["state"] == "starting"
    assert cluster.launch("cluster", "down").returncode == 0
    assert cluster.living() == []


def test_down_ends_a_start_that_is_under_way(cluster: Cluster) -> None:
    cluster.behave(worker_0="never join")
    start = cluster.open(cluster.up_command())
    wait_for(lambda: len(cluster.living()) >= 6, "three supervisors and their children")
    assert cluster.launch("cluster", "down").returncode == 0
    _, error = start.communicate()
    assert start.returncode in (6, 130), error
    assert cluster.living() == []


@pytest.mark.parametrize(
    ("view", "press"),
    [
        (["logs", "worker-0", "-f"], os.kill),
        (["logs", "worker-0", "-f"], signal_aside),  # nothing else ends this wait
        (["status", "--watch"], os.kill),
        (["up", "--wait"], os.kill),
    ],
)
def test_ctrl_c_on_a_view_never_stops_the_run(
    cluster: Cluster, view: list[str], press: Callable[[int, signal.Signals], None]
) -> None:
    if view == ["up", "--wait"]:
        looking = cluster.open(cluster.up_command("--wait"))
        wait_for(lambda: cluster.runs() and cluster.status()["state"] == "running", "training")
        assert looking.stderr is not None
        while "step" not in looking.stderr.readline():
            pass
    else:
        assert cluster.up().returncode == 0
        looking = cluster.open([*LAUNCH, *view])
        assert looking.stdout is not None
        looking.stdout.readline()
    press(looking.pid, signal.SIGINT)
    _, error = looking.communicate()
    assert looking.returncode == 130
    assert "continues. Return: launch" in error
    status = cluster.status()
    assert status["state"] == "running"
    assert [process["attempt"] for process in status["processes"]] == [1, 1, 1]


@pytest.mark.smoke("logs")
def test_a_killed_worker_comes_back_and_its_log_is_followed(cluster: Cluster) -> None:
    assert cluster.up().returncode == 0
    following = cluster.open([*LAUNCH, "logs", "worker-1", "-f"])
    assert following.stdout is not None
    assert following.stdout.readline() == "worker-1 here, work \n"
    os.kill(cluster.status()["processes"][2]["pid"], signal.SIGKILL)
    assert following.stdout.readline() == "worker-1 here, work \n"
    worker = cluster.status()["processes"][2]
    assert (worker["state"], worker["attempt"], worker["signal"]) == ("running", 2, 9)
    assert cluster.launch("cluster", "down").returncode == 0
    rest, error = following.communicate()
    assert following.returncode == 0
    assert rest == ""
    assert "--- worker-1: attempt 2 ---" in error
    assert "--- worker-1 stopped" in error
    assert cluster.launch("logs", "worker-1", "--attempt", "1").stdout == "worker-1 here, work \n"


@pytest.mark.smoke("down")
def test_down_finds_what_no_supervisor_knows_of(cluster: Cluster) -> None:
    """A process that left its session and its parents still carries the run's id."""
    assert cluster.up().returncode == 0
    (run_id,) = cluster.runs()
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {"MOTLEY_RUN_ID": run_id},
        start_new_session=True,
    )
    for process in cluster.status()["processes"]:
        os.kill(process["supervisor_pid"], signal.SIGKILL)
    done = cluster.launch("cluster", "down")
    assert done.returncode == 0
    assert "killed a leftover process: python" in done.stdout
    assert str(orphan.pid) in done.stdout
    assert orphan.wait(PATIENCE) == -signal.SIGKILL
    assert cluster.living() == []
