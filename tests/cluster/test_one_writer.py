"""Two coordinators of one run: one of them loses, also when it had been the first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.real_cluster import STEPS, Cluster
from tests.cluster.real_process import Process
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for
from trainer.checkpoint.reader import read_progress
from trainer.tracking.metrics import read_metrics
from trainer.tracking.status import read_status

pytestmark = pytest.mark.cluster

SLOW = ("--seconds", "0.005")
IMPORTED = """
import json, sys
from trainer.cli import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""
"""A trainer that tells, whatever its end, what it has imported."""


def second_coordinator(cluster: Cluster) -> Process:
    """Start one with the same run id and output."""
    bind = f"127.0.0.1:{free_port()}"
    flags = ("--role", "coordinator", "--bind", bind, "--expect-workers", "1")
    return cluster.trainer("second", *flags)


def elsewhere(cluster: Cluster, silence: float) -> Process:
    """Start a coordinator on what stands for another host."""
    command = [sys.executable, "-m", "tests.cluster.elsewhere", str(silence), "finetune"]
    command += ["--config", str(cluster.run_file), "--run-id", "run", "--expect-workers", "1"]
    command += ["--role", "coordinator", "--bind", cluster.address]
    return cluster.start("coordinator", command)


def assert_refused(process: Process, holder: Process) -> None:
    assert process.wait() == 4
    complaint = process.text.strip().splitlines()[-1]
    assert complaint.startswith("trainer: ")
    assert f"in use by run run, pid {holder.pid} on host" in complaint
    assert re.search(r", since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ; ", complaint)
    assert f"kill {holder.pid} there" in complaint
    assert "Traceback" not in process.text


def written(cluster: Cluster) -> dict[Path, int]:
    files = (path for path in cluster.output.rglob("*") if path.is_file())
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.smoke("resume")
def test_a_second_one_is_refused_and_the_first_undisturbed(cluster: Cluster) -> None:
    first = cluster.coordinator(1)
    first.signal(signal.SIGSTOP)  # what is written now, another one writes
    before = written(cluster)
    for second in (second_coordinator(cluster), cluster.trainer("local", "--threads", "1")):
        assert_refused(second, first)
    assert written(cluster) == before
    first.signal(signal.SIGCONT)
    assert cluster.status["pid"] == first.pid
    worker = cluster.worker(0)
    assert [first.wait(), worker.wait()] == [0, 0]
    cluster.check_contracts([0])
    assert len(cluster.events("listening")) == 1


def test_a_second_one_beside_one_that_runs_alone_is_refused(cluster: Cluster) -> None:
    """Also under another run id; every step of the first stands in the metrics once."""
    cluster.configure(training__epochs=500)
    alone = ("--gpu-backend", "cpu", "--threads", "1")
    first = cluster.trainer("first", *alone)
    cluster.wait_step(3)
    first.signal(signal.SIGSTOP)  # what is written now, another one writes
    before = written(cluster)
    second = [cluster.trainer("second", *alone), second_coordinator(cluster)]
    second.append(cluster.trainer("third", *alone, "--run-id", "another"))
    for process in second:
        assert_refused(process, first)
    assert written(cluster) == before
    first.signal(signal.SIGCONT)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    cluster.check_contracts_so_far([0])
    assert len(cluster.events("joined")) == 1


def test_the_refusal_comes_before_torch_is_imported(cluster: Cluster) -> None:
    first = cluster.coordinator(1)
    words = ["finetune", "--config", str(cluster.run_file), "--run-id", "run"]
    second = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert second.returncode == 4
    assert f"pid {first.pid} on host" in second.stderr
    assert "torch" not in json.loads(second.stdout.splitlines()[-1])


def test_of_two_that_start_at_once_one_serves(cluster: Cluster) -> None:
    racing = [second_coordinator(cluster) for _ in range(2)]
    wait_for(lambda: any(not process.running for process in racing), "one loses", cluster)
    loser, winner = sorted(racing, key=lambda process: process.running)
    assert_refused(loser, winner)
    wait_for(lambda: cluster.events("listening"), "the winner listens", cluster)
    winner.signal(signal.SIGTERM)
    assert winner.wait() == 0
    assert cluster.status["pid"] == winner.pid


def test_a_killed_one_is_followed_at_once(cluster: Cluster) -> None:
    """Also one that runs alone."""
    for flags in (("--role", "coordinator", "--bind", cluster.address), ("--threads", "1")):
        started = [cluster.trainer("first", *flags)]
        wait_for(lambda: cluster.output.joinpath("status.json").exists(), "it runs", cluster)
        started[0].kill()
        cluster.output.joinpath("status.json").unlink(missing_ok=True)
    last = cluster.coordinator(1)
    assert "for its heartbeat" not in last.text, "it waited for nothing"
    worker = cluster.worker(0)
    assert [last.wait(), worker.wait()] == [0, 0]
    assert cluster.step == STEPS


def test_one_that_was_cut_off_and_followed_on_another_host_stops(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It wakes up with a step to commit and checkpoints to write, and writes neither."""
    share = tmp_path / "share" / "run"
    successor = cluster.another("run")
    for run in (cluster, successor):
        run.configure(checkpoint__folder=str(share), checkpoint__every=1, training__epochs=1000)
    first = cluster.coordinator(1)
    cluster.worker(0, *SLOW)
    cluster.wait_event("checkpoint")
    first.signal(signal.SIGSTOP)
    saved = cluster.events("checkpoint")[-1]["step"]

    second = elsewhere(successor, silence=1.0)
    resumed = successor.wait_event("resumed")
    assert resumed["step"] >= saved
    assert f"pid {first.pid} on host" in second.text
    successor.worker(0, *SLOW)
    successor.wait_event("checkpoint")
    first.signal(signal.SIGCONT)
    assert first.wait() == 4
    said = first.text.strip().splitlines()[-1]
    assert f"{share}: taken over by run run, pid {second.pid} on host" in said
    assert "Traceback" not in first.text
    assert not cluster.events("alarm"), "no checkpoint was tried in vain for long"
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    last = successor.step
    assert (share / "latest").readlink().name == f"step-{last:06d}"
    (joined,) = successor.events("joined")
    assert read_progress(share / "latest").generation == joined["generation"]
    assert read_status(share / "status.json")["pid"] == second.pid
    steps = [r for r in read_metrics(successor.output / "metrics.jsonl") if r["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(resumed["step"] + 1, last + 1))


def test_a_crash_of_its_host_costs_one_silence(cluster: Cluster, tmp_path: Path) -> None:
    """Not one for the output and another one for the checkpoints."""
    cluster.configure(checkpoint__folder=str(tmp_path / "share"), checkpoint__every=1)
    cluster.coordinator(1).kill()
    second = elsewhere(cluster, silence=1.0)
    worker = cluster.worker(0)
    assert [second.wait(), worker.wait()] == [0, 0]
    assert second.text.count("waiting 1 s for its heartbeat") == 1


def test_a_living_one_on_another_host_refuses(cluster: Cluster, tmp_path: Path) -> None:
    share = tmp_path / "share" / "run"
    other = cluster.another("run")
    for run in (cluster, other):
        run.configure(checkpoint__folder=str(share))
    first = cluster.coordinator(1)
    assert_refused(elsewhere(other, silence=30.0), first)
    assert cluster.status["state"] == "waiting"
    assert first.running
