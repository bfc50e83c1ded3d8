"""`launch` with a replica group, real trainers and their supervisors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]


@pytest.mark.long
def test_a_group_is_one_worker_with_members_and_comes_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    tree = json.loads(cluster.inventory.read_text())
    host = tree["all"]["hosts"]["localhost"]
    del host["motley_trainer_command"]
    host["motley_devices"] = [{"backend": "cpu", "ids": ["cpu", "cpu"], "strategy": "ddp"}]
    cluster.inventory.write_text(json.dumps(tree))
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    words = ["--set", "training.max_steps=100000", "--model", str(model)]
    started = cluster.up("--json", *words, workers=1)
    assert started.returncode == 0, started.stderr
    status = json.loads(started.stdout)
    _, worker = status["processes"]
    assert (status["expect_workers"], status["joined"]) == (1, [0])
    assert (worker["device"], worker["members"]) == ("cpu+cpu (ddp)", ["cpu", "cpu"])
    assert "cpu+cpu (ddp)" in cluster.launch("status").stdout

    (member,) = psutil.Process(worker["pid"]).children()
    os.kill(member.pid, signal.SIGKILL)

    def is_back() -> bool:
        worker = cluster.status()["processes"][1]
        return worker["attempt"] == 2 and worker["joined"]

    wait_for(is_back, "the supervisor starts the group again, and it joins")
    assert "was killed by SIGKILL" in cluster.launch("logs", "worker-0", "--attempt", "1").stdout
    assert cluster.launch("cluster", "down").returncode == 0
    assert cluster.living() == []
