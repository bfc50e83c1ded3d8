"""A command for notifications is of one start: the next one has its own, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.trainer.small_model import write_data, write_model

pytestmark = [pytest.mark.cluster, pytest.mark.long]
__all__ = ["cluster"]


def test_a_command_travels_with_one_start_alone(cluster: Cluster, tmp_path: Path) -> None:
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    configs = tmp_path / "configs"
    cluster.environment |= {
        "MOTLEY_INVENTORY": str(cluster.inventory),
        "XDG_CONFIG_HOME": str(configs),
    }
    told = tmp_path / "told.jsonl"
    command = f"""sh -c 'cat >> "$0"' {told}"""
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    job = ("--model", str(model), "--data", str(cluster.data), "-o", str(cluster.output), "-n", "1")

    def up(steps: int, *words: str) -> list[str]:
        """Start or resume the run, follow it to its end, and return the events of all starts."""
        words = (*words, "--set", f"training.max_steps={steps}", "--wait")
        done = cluster.launch("cluster", "up", *words)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["event"] for line in told.read_text().splitlines()]

    assert up(4, *job, "--notify", command) == ["completed"]
    (run_id,) = cluster.runs()
    holding = {
        path.name
        for folder in (cluster.state, cluster.output)
        for path in folder.rglob("*")
        if path.is_file() and str(told).encode() in path.read_bytes()
    }
    assert holding == {"spec.json"}  # of this start's supervisor

    assert up(6, "--resume", run_id) == ["completed"]
    (configs / "motley").mkdir(parents=True)
    (configs / "motley/notify.yaml").write_text(json.dumps({"command": command}))
    assert up(8, "--resume", run_id) == ["completed", "resumed", "completed"]
    assert up(10, "--resume", run_id, "--notify", "") == ["completed", "resumed", "completed"]
