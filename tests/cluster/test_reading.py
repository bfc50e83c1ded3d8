"""A worker or rank whose data takes long to read: awaited while it makes progress, else named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cluster.held_cache import HeldCache, write_large
from tests.cluster.real_cluster import Bench, Cluster
from tests.cluster.real_process import Process
from tests.waiting import wait_for
from trainer.data.encoded_rows import LEAST_BYTES

pytestmark = pytest.mark.cluster

DEADLINE = 10.0
"""Seconds to join, enough to open the replica."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("large")


@pytest.fixture
def large(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return data that is large enough for the cache, which all tests fill once."""
    monkeypatch.setenv("MOTLEY_CACHE", str(folder / "cache"))
    return write_large(bench.train, folder / "large.jsonl", LEAST_BYTES)


@pytest.mark.parametrize("certified", [False, True], ids=["plaintext", "tls"])
def test_a_worker_that_reads_beyond_the_join_deadline_joins(
    cluster: Cluster, large: Path, certified: bool
) -> None:
    cluster.certified = certified
    coordinator = start_coordinator(cluster, large, DEADLINE)
    with HeldCache(cluster.folder / "remote", grows=True) as cache:
        worker = start_worker(cluster, cache)
        listening = time.monotonic()
        wait_for(lambda: time.monotonic() - listening > 1.5 * DEADLINE, "the deadline", cluster)
        assert not cluster.events("joined")
        assert coordinator.running, coordinator.text
        cache.fill(large.parent / "cache")
    assert coordinator.wait() == 0, coordinator.text
    assert worker.wait() == 0, worker.text
    assert cluster.step == 2
    assert len(cluster.events("joined")) == 1


def test_a_worker_whose_reading_hangs_is_named_and_ends_with_the_run(
    cluster: Cluster, large: Path
) -> None:
    coordinator = start_coordinator(cluster, large, DEADLINE / 2)
    with HeldCache(cluster.folder / "remote", grows=False) as cache:
        worker = start_worker(cluster, cache)
        assert coordinator.wait() == 3, coordinator.text
        assert worker.wait() == 3, worker.text
    waits = f"waiting for another process that fills {cache.folder}: 0.0 MiB"
    stuck = f"rank 0 on {os.uname().nodename} got no further than {waits}: look at its log, and at"
    assert f"rank 0 did not join within 5 s; {stuck}" in cluster.status["reason"]
    assert "the coordinator ends this worker while it reads its data: rank 0 did not" in worker.text
    for process in (coordinator, worker):
        assert stuck in process.text, process.text
        assert "Traceback" not in process.text


def start_coordinator(cluster: Cluster, data: Path, deadline: float) -> Process:
    cluster.configure(
        data__train=str(data), exchange__join_deadline=deadline, training__max_steps=2
    )
    return cluster.coordinator(expect=1)


def start_worker(cluster: Cluster, cache: HeldCache) -> Process:
    """Start one that has a cache of its own, as on another host."""
    return cluster.torch_worker(
        0,
        *("--gpu-backend", "cpu"),
        *(("--tls", str(cluster.bench.tls / "rank-0")) if cluster.certified else ()),
        MOTLEY_CACHE=str(cache.folder),
    )
