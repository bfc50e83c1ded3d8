"""Workers that do not belong: each is told why and ends with exit code 4; the run goes on."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest

from tests.cluster.real_cluster import Cluster, Process
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster


def other_model(cluster: Cluster) -> str:
    """Copy the model and change one bit of one weight."""
    folder = shutil.copytree(cluster.bench.model, cluster.folder / "other-model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def other_data(cluster: Cluster) -> str:
    """Copy the training data without its last sample."""
    lines = cluster.bench.train.read_bytes().splitlines(keepends=True)
    path = cluster.folder / "other.jsonl"
    path.write_bytes(b"".join(lines[:-1]))
    return str(path)


@pytest.mark.smoke("refuse")
def test_workers_of_another_job_are_refused(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(2)
    first = cluster.worker(0)
    cluster.wait_event("joined", rank=0)

    def start_other_worker(name: str, *flags: str, run_id: str = "run", **settings: Any) -> Process:
        other = cluster.another(name)
        other.configure(**settings)
        other.run_id = run_id
        return other.worker(1, *flags, address=cluster.address)

    refused = [
        ("config differs", start_other_worker("config", optimizer__learning_rate=2e-3)),
        ("config differs", start_other_worker("length", training__max_steps=3)),
        ("model or script differs", start_other_worker("model", model__path=other_model(cluster))),
        ("data differs", start_other_worker("data", data__train=other_data(cluster))),
        ("another run", start_other_worker("run-id", run_id="another-runs")),
        (
            "version of Motley differs",
            start_other_worker("version", "--claim", "motley_version:0.0.1"),
        ),
        ("gradient layout differs", start_other_worker("layout", "--claim", "layout_digest:abc")),
        ("protocol version", start_other_worker("protocol", "--protocol", "8")),
    ]
    for reason, worker in refused:
        assert worker.wait() == 4, f"{reason}: {worker.text}"
        assert reason in worker.text.splitlines()[-1]
        assert "Traceback" not in worker.text
        told = [event["reason"] for event in cluster.events("refused")]
        assert any(reason in text for text in told), told
    second = cluster.worker(1)
    assert [process.wait() for process in (coordinator, first, second)] == [0, 0, 0]
    cluster.check_contracts([0, 1])


def test_a_rank_that_is_taken_waits_its_turn(cluster: Cluster) -> None:
    """The one that is in stays in; the other keeps asking, and takes over when it is gone."""
    cluster.configure(training__epochs=4)
    coordinator = cluster.coordinator(1)
    first = cluster.worker(0, "--seconds", "0.01")
    cluster.wait_event("joined", rank=0)
    second = cluster.worker(0, "--seconds", "0.002")
    refused = cluster.wait_event("refused", rank=0)
    assert "rank 0 has already joined" in refused["reason"]
    assert not cluster.events("lost")
    first.signal(signal.SIGKILL)
    cluster.wait_event("rejoined", rank=0)
    assert [coordinator.wait(), second.wait()] == [0, 0]
    cluster.check_contracts([0])


def test_every_rank_is_refused_when_the_run_is_over(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0)
    assert [coordinator.wait(), worker.wait()] == [0, 0]
    cluster.configure(exchange__join_deadline=1.0)
    late = cluster.worker(0)
    assert late.wait() == 3
    wait_for(lambda: "no coordinator for 1 s" in late.text, "the reason")
