"""`launch cluster up --script`: the hosts run what this start sent, and nothing else."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.launcher.sshd import Server, running_sshd
from tests.trainer.script_run import losses, plain_losses, script_config, write_script
from tests.waiting import PATIENCE
from trainer.tracking.metrics import read_metrics

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_sshd(tmp_path) as made:
        yield made


def test_a_host_behind_ssh_runs_the_script_that_the_start_named(
    cluster: Cluster, tmp_path: Path, server: Server
) -> None:
    """A real sshd; afterwards its copy is changed, and the run's own command refuses it."""
    far = server.folder / "far"
    tree = json.loads(cluster.inventory.read_text())
    hosts = tree["all"]["hosts"]
    del hosts["localhost"]["motley_trainer_command"]
    hosts["localhost"] |= {"motley_coordinator": True, "motley_connect_address": "127.0.0.1"}
    hosts["far"] = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": getpass.getuser(),
        "ansible_ssh_common_args": f"-F {server.config}",
        "motley_devices": [{"backend": "cpu"}],
        "motley_fill_with_cpu": True,
        "motley_trainer_command": [str(Path(sys.executable).with_name("trainer"))],
        "motley_state_folder": str(far),
    }
    cluster.inventory.write_text(json.dumps(tree))
    cluster.environment["MOTLEY_INVENTORY"] = str(cluster.inventory)
    script = write_script(tmp_path / "train.py")
    run = script_config(cluster.output, training__evaluate_every=4)
    config = tmp_path / "mine.yaml"
    config.write_text(run.to_yaml(exclude_unset=True))
    words = ("--config", str(config), "--script", str(script), "--expect-workers", "2", "--wait")
    done = cluster.launch("cluster", "up", *words)
    assert done.returncode == 0, done.stderr
    expected, _ = plain_losses(script, run)
    assert np.abs(losses(cluster.output) / expected - 1).max() < 1e-6
    (run_id,) = cluster.runs()
    records = read_metrics(cluster.output / "metrics.jsonl")
    figures = [each["figures"] for each in records if each["kind"] == "validation"][-1]
    absolute = f"{figures['absolute']:.4g}"
    shown = cluster.launch("status").stdout
    assert f"absolute {absolute}" in shown
    assert " samples/s" in shown
    assert "SAMPLES/S" in shown
    status = json.loads(cluster.launch("status", "--json").stdout)
    assert status["training"]["validation"]["figures"] == figures
    page = tmp_path / "report.md"
    report = cluster.launch("report", run_id, "-o", str(page))
    assert report.returncode == 0, report.stderr
    assert f"| absolute | {absolute} |" in page.read_text()
    assert "perplexity" not in page.read_text()
    assert "tokens" not in page.read_text().partition("run.yaml")[0]
    assert f"--output {run.output}-again --script FILE" in page.read_text()

    folder = far / "runs" / run_id
    (copy,) = far.rglob("script.py")
    assert copy.read_bytes() == script.read_bytes()
    plan = json.loads((folder / "plan.json").read_bytes())
    (worker,) = (each for each in plan["processes"] if each["host"] == "far")
    marker = tmp_path / "executed"
    copy.write_text(f"open({str(marker)!r}, 'w')\n" + copy.read_text())
    refused = subprocess.run(
        worker["argv"], env=cluster.environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert refused.returncode == 4
    assert "is not the script that the run was started with" in refused.stderr
    assert not marker.exists()
