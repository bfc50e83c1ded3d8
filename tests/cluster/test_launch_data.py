"""`launch` with data that is a folder which `sync inputs` brought, or a data set of the hub."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.hub import running_hub
from tests.ports import free_port
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]

COLUMNS = ("--set", "data.columns={text: body}")


@pytest.fixture
def real(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Return a cluster of the real trainer with a model of its own."""
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    cluster.environment["MOTLEY_INVENTORY"] = str(cluster.inventory)
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    cluster.config = ["--model", str(model), "--output", str(cluster.output)]
    return cluster


def write_shards(folder: Path, name: str = "echo") -> None:
    """Write a folder of Parquet shards whose texts stand in the column `body`."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "data").mkdir(parents=True)
    for part in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        texts = [f"{name} {part} {number}" for number in range(20)]
        table = pa.table({"body": texts, "id": [*range(20)]})
        parquet.write_table(table, folder / "data" / f"{part}.parquet")
    (folder / "README.md").write_text("no data")


def train_and_resume(cluster: Cluster, data: str) -> None:
    """Start a run, end it after a checkpoint, and see it go on by its id alone.

    It has the workers and the port that it was started with, whatever the inventory says.
    """
    port = free_port()
    assert port != cluster.port
    settings = ("--set", "training.max_steps=100000", "--set", "checkpoint.every=20")
    start = ("-e", f"motley_port={port}", "--expect-workers", "2")
    words = (*cluster.config, "--data", data, *COLUMNS, *settings, *start)
    started = cluster.launch("cluster", "up", *words)
    assert started.returncode == 0, started.stderr
    (run_id,) = cluster.runs()
    wait_for(lambda: cluster.training.get("checkpoint"), "a checkpoint")
    assert_at_work(cluster, port)
    assert cluster.launch("cluster", "down").returncode == 0
    stopped_at = cluster.training["step"]
    resumed = cluster.launch("cluster", "up", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {run_id} {' '.join(start)}\n" in resumed.stderr
    assert cluster.runs() == [run_id]
    wait_for(lambda: cluster.training["step"] > stopped_at, "a step after the last one")
    assert_at_work(cluster, port)


def assert_at_work(cluster: Cluster, port: int) -> None:
    """See that two workers are in the run and the coordinator listens on a port."""
    tree = cluster.status()
    assert (tree["expect_workers"], tree["joined"]) == (2, [0, 1])
    leader = tree["processes"][0]
    assert (leader["role"], leader["address"]) == ("coordinator", f"127.0.0.1:{port}")
    socket.create_connection(("127.0.0.1", port), 10).close()


@pytest.mark.long
@pytest.mark.needs("rsync")
def test_a_run_reads_the_folder_that_sync_brought_and_resumes(
    real: Cluster, tmp_path: Path
) -> None:
    write_shards(tmp_path / "shards")
    synced = real.launch("sync", "inputs", str(tmp_path / "shards"))
    assert synced.returncode == 0, synced.stderr
    train_and_resume(real, str(real.state / "inputs/shards"))
    log = real.launch("logs", "coordinator").stdout
    assert "reads 2 files; leaves out: documentation (1: README.md), split test (1: data/" in log
    assert "36 samples, " in log


@pytest.mark.long
def test_a_run_on_data_of_the_hub_resumes(real: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the launcher-only install has none")
    write_shards(tmp_path / "shards")
    with running_hub() as hub:
        hub.folders["owner/name"] = tmp_path / "shards"
        real.environment |= hub.environment(tmp_path / "cache")
        train_and_resume(real, "hf://datasets/owner/name")
        shards = {f"data/train-0000{part}-of-00002.parquet" for part in (0, 1)}
        assert set(hub.asked) == {"README.md", *shards}
        log = real.launch("logs", "coordinator").stdout
        commit = hub.revision("owner/name")
        assert f"hf://datasets/owner/name: reads 2 files of @{commit}; leaves out: " in log
        assert "HTTP Request" not in log
