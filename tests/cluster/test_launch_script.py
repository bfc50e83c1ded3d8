"""`launch cluster up --script`: the hosts run what this start sent, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.trainer.script_run import losses, plain_losses, script_config, write_script

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]


def test_a_script_is_sent_and_trained(cluster: Cluster, tmp_path: Path) -> None:
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    cluster.environment["MOTLEY_INVENTORY"] = str(cluster.inventory)
    script = write_script(tmp_path / "train.py")
    run = script_config(cluster.output)
    config = tmp_path / "mine.yaml"
    config.write_text(run.to_yaml(exclude_unset=True))
    unnamed = cluster.launch("cluster", "up", "--config", str(config))
    assert unnamed.returncode == 2
    assert "task script: name the script with --script FILE" in unnamed.stderr
    words = ("--config", str(config), "--script", str(script), "--expect-workers", "2", "--wait")
    done = cluster.launch("cluster", "up", *words)
    assert done.returncode == 0, done.stderr
    expected, _ = plain_losses(script, run)
    assert np.abs(losses(cluster.output) / expected - 1).max() < 1e-6
    (run_id,) = cluster.runs()
    (copy,) = cluster.state.rglob("script.py")
    assert copy.read_bytes() == script.read_bytes()
    again = cluster.launch("cluster", "up", "--resume", run_id)
    assert again.returncode == 2
    assert "task script: name the script with --script FILE" in again.stderr
