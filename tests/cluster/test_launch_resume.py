"""`launch cluster up --resume` with real processes, most with a stand-in for the trainer."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.ports import free_port
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]


def test_a_run_is_resumed_under_its_id_and_foreign_checkpoints_are_kept(cluster: Cluster) -> None:
    assert cluster.up().returncode == 0
    (run_id,) = cluster.runs()
    assert "cluster is busy" in cluster.up("--resume", run_id).stderr
    assert cluster.launch("cluster", "down").returncode == 0
    (cluster.output / "checkpoints" / "step-000001").mkdir(parents=True)
    other = cluster.up()
    assert other.returncode == 4
    assert f"resume that run: --resume {run_id}" in other.stderr
    resumed = cluster.up("--resume", run_id, "--json")
    assert resumed.returncode == 0, resumed.stderr
    tree = json.loads(resumed.stdout)
    assert (tree["run_id"], tree["state"]) == (run_id, "running")
    # The stand-in's marks of its first life let it say "joined" before its workers are back.
    wait_for(
        lambda: {p["attempt"] for p in cluster.status()["processes"]} == {2}, "second attempts"
    )
    assert cluster.runs() == [run_id]


def test_a_run_comes_back_with_the_workers_and_the_port_that_it_was_started_with(
    cluster: Cluster, tmp_path: Path
) -> None:
    """With the real trainer: who resumes gives the run's id and nothing else."""
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    cluster.environment["MOTLEY_INVENTORY"] = str(cluster.inventory)
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    port = free_port()
    assert port != cluster.port  # which the inventory says
    words = ["--set", "data.validation=null", "--set", "training.max_steps=100000"]
    words += ["--set", "checkpoint.every=20", "--model", str(model), "--data", str(cluster.data)]
    words += ["--output", str(cluster.output), "-e", f"motley_port={port}", "--expect-workers", "2"]
    started = cluster.launch("cluster", "up", *words)
    assert started.returncode == 0, started.stderr
    (run_id,) = cluster.runs()
    wait_for(lambda: cluster.status()["training"]["checkpoint"], "a checkpoint")
    assert_at_work(cluster, port)
    assert cluster.launch("cluster", "down").returncode == 0
    stopped_at = cluster.status()["training"]["step"]

    resumed = cluster.launch("cluster", "up", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {run_id} -e motley_port={port} --expect-workers 2\n" in resumed.stderr
    assert cluster.runs() == [run_id]
    wait_for(lambda: cluster.status()["training"]["step"] > stopped_at, "a step after the last one")
    assert_at_work(cluster, port)


def assert_at_work(cluster: Cluster, port: int) -> None:
    """See that two workers are in the run and the coordinator listens on a port."""
    tree = cluster.status()
    assert (tree["expect_workers"], tree["joined"]) == (2, [0, 1])
    leader = tree["processes"][0]
    assert (leader["role"], leader["address"]) == ("coordinator", f"127.0.0.1:{port}")
    socket.create_connection(("127.0.0.1", port), 10).close()
