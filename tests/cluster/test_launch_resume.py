"""`launch cluster up --resume` with a stand-in for the trainer; a real one: `test_launch_data`."""

from __future__ import annotations

import json

import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]


@pytest.mark.smoke("resume")
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
