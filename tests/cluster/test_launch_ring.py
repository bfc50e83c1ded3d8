"""`launch` with a ring: real ranks and their supervisors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.session.processes import ProcessIdentity
from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]
WORLD = 4
EVERY = 20
"""Steps between checkpoints: to save costs four ranks on two cores more than to train."""


@pytest.fixture
def ring(cluster: Cluster, tmp_path: Path) -> tuple[str, ...]:
    """Let the cluster start real trainers, and return the words that make a ring of them."""
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    settings = ("exchange.topology=ring", "training.max_steps=100000", f"checkpoint.every={EVERY}")
    settings = tuple(word for setting in settings for word in ("--set", setting))
    return (*settings, "--model", str(model))


def words_of(process: ProcessIdentity) -> list[str]:
    """Return a process's command line."""
    return Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")


def has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch's library."""
    return "/libtorch_cpu.so" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)  # four interpreters that import torch
def test_a_lost_rank_is_named_and_all_start_again_at_the_newest_checkpoint(
    cluster: Cluster, ring: tuple[str, ...]
) -> None:
    started = cluster.up("--json", *ring, workers=WORLD)
    assert started.returncode == 0, started.stderr
    assert "a ring is not elastic: a lost rank ends all" in started.stderr
    assert f"a ring of {WORLD} workers, rank 0 on 127.0.0.1:{cluster.port}" in started.stderr
    status = json.loads(started.stdout)
    assert status["joined"] == list(range(WORLD))
    assert [process["role"] for process in status["processes"]] == ["worker"] * WORLD
    assert status["training"]["expect_workers"] == WORLD

    def reached(step: int) -> bool:
        return cluster.training["state"] == "running" and cluster.training["step"] >= step

    wait_for(lambda: reached(EVERY + 1), "a checkpoint")
    os.kill(cluster.status()["processes"][2]["pid"], signal.SIGKILL)
    again: list[dict[str, Any]] = []

    def all_are_back() -> bool:
        again[:] = cluster.status()["processes"]
        return all(process["attempt"] >= 2 and process["joined"] for process in again)

    wait_for(all_are_back, "every rank's second attempt")
    assert again[2]["signal"] == signal.SIGKILL
    forking = [process.pid for process in cluster.living() if "--distributed" in words_of(process)]
    assert len(forking) == 2 * WORLD, "each rank, and the process that forks its attempts"
    assert all(map(has_torch, forking)), "an attempt imports torch once more"
    assert {again[rank]["exit_code"] for rank in (0, 1, 3)} == {3}
    for name in ("worker-0", "worker-3"):
        log = cluster.launch("logs", name, "--attempt", "1").stdout
        assert f"no heartbeat from rank 2 on {os.uname().nodename} (killed" in log
    text = (cluster.output / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    resumed = next(line["step"] for line in lines if line.get("event") == "resumed")
    assert resumed >= EVERY
    assert resumed % EVERY == 0
    wait_for(lambda: reached(resumed + 1), "further steps")
    table = cluster.launch("status").stdout
    assert all(f"worker-{rank}" in table for rank in range(WORLD))
    assert "coordinator" not in table

    assert cluster.launch("cluster", "down").returncode == 0
    assert cluster.living() == []
    status = cluster.status()
    assert status["state"] == "stopped"
    assert status["training"]["checkpoint"]["step"] == status["training"]["step"]
