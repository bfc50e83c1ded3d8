"""A process whose data takes long to read: awaited while it makes progress, else named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.by_hand import Hands
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
        worker = start_worker(cluster, cache.folder)
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
        worker = start_worker(cluster, cache.folder)
        assert coordinator.wait() == 3, coordinator.text
        assert worker.wait() == 3, worker.text
    waits = f"waiting for another process that fills {cache.folder}: 0.0 MiB"
    stuck = f"rank 0 on {os.uname().nodename} stalled at {waits}: check its log, and the"
    assert f"rank 0 did not join within 5 s; {stuck}" in cluster.status["reason"]
    assert "the coordinator ends this worker while it reads its data: rank 0 did not" in worker.text
    for process in (coordinator, worker):
        assert stuck in process.text, process.text
        assert "Traceback" not in process.text


@pytest.mark.parametrize("certified", [False, True], ids=["plaintext", "tls"])
def test_a_coordinator_that_reads_beyond_the_join_deadline_is_awaited(
    cluster: Cluster, large: Path, monkeypatch: pytest.MonkeyPatch, certified: bool
) -> None:
    cluster.certified = certified
    with HeldCache(cluster.folder / "remote", grows=True) as cache:
        coordinator = start_slow_coordinator(cluster, large, cache, DEADLINE, monkeypatch)
        worker = start_worker(cluster, large.parent / "cache")
        worker.says(f"waiting for the coordinator on {os.uname().nodename}: waiting for another")
        answered = time.monotonic()
        wait_for(lambda: time.monotonic() - answered > 1.5 * DEADLINE, "the deadline", cluster)
        assert worker.running, worker.text
        cache.fill(large.parent / "cache")
    assert coordinator.wait() == 0, coordinator.text
    assert worker.wait() == 0, worker.text
    assert cluster.step == 2
    assert len(cluster.events("joined")) == 1
    assert not cluster.events("refused")


def test_a_coordinator_whose_reading_hangs_is_named_and_given_up(
    cluster: Cluster, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldCache(cluster.folder / "remote", grows=False) as cache:
        coordinator = start_slow_coordinator(cluster, large, cache, DEADLINE / 2, monkeypatch)
        worker = start_worker(cluster, large.parent / "cache")
        assert worker.wait() == 3, worker.text
        assert coordinator.running, coordinator.text
    assert (
        f"trainer: {cluster.address}: not admitted for 5 s (the coordinator on"
        f" {os.uname().nodename} stalled at waiting for another process that fills"
        f" {cache.folder}: 0.0 MiB: check its log, and the disk, pipe or network folder"
    ) in worker.text
    assert "Traceback" not in worker.text + coordinator.text


def test_a_coordinator_that_is_killed_as_it_reads_is_awaited_and_joined_by_its_next_start(
    cluster: Cluster, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldCache(cluster.folder / "remote", grows=True) as cache:
        killed = start_slow_coordinator(cluster, large, cache, DEADLINE, monkeypatch)
        worker = start_worker(cluster, large.parent / "cache")
        worker.says("waiting for the coordinator on")
        killed.kill()
    monkeypatch.undo()
    monkeypatch.setenv("MOTLEY_CACHE", str(large.parent / "cache"))
    coordinator = cluster.coordinator(expect=1)
    assert [coordinator.wait(), worker.wait()] == [0, 0], worker.text
    assert cluster.step == 2


def test_a_coordinator_that_is_killed_as_it_reads_is_given_up(
    cluster: Cluster, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldCache(cluster.folder / "remote", grows=True) as cache:
        coordinator = start_slow_coordinator(cluster, large, cache, DEADLINE / 2, monkeypatch)
        worker = start_worker(cluster, large.parent / "cache")
        worker.says("waiting for the coordinator on")
        coordinator.kill()
        assert worker.wait() == 3, worker.text
    assert f"trainer: {cluster.address}: no coordinator for 5 s (" in worker.text
    assert "Traceback" not in worker.text


def test_ranks_wait_for_one_that_reads_beyond_the_join_deadline(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_rank(hands, 0, DEADLINE)
    wait_for(lambda: "data: " in first.text, "rank 0 has read its data")
    with HeldCache(hands.folder / "remote", grows=True) as cache:
        monkeypatch.setenv("MOTLEY_CACHE", str(cache.folder))
        second = start_rank(hands, 1, DEADLINE)
        started = time.monotonic()
        wait_for(lambda: time.monotonic() - started > 1.5 * DEADLINE, "the deadline")
        assert first.running, first.text
        assert second.running, second.text
        cache.fill(hands.data.parent / "cache")
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    assert hands.status["step"] == 2


def test_a_rank_whose_reading_hangs_is_named_and_ends_with_the_others(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldCache(hands.folder / "remote", grows=False) as cache:
        first = start_rank(hands, 0, DEADLINE / 2)
        monkeypatch.setenv("MOTLEY_CACHE", str(cache.folder))
        second = start_rank(hands, 1, DEADLINE / 2)
        assert [first.wait(), second.wait()] == [3, 3], first.text + second.text
    waits = f"waiting for another process that fills {cache.folder}: 0.0 MiB"
    reason = (
        "rank 0 waited 5 s for rank 1 of 2: start the missing ranks, and check their logs; rank 1"
        f" on {os.uname().nodename} stalled at {waits}: check the disk, pipe or network"
    )
    assert f"trainer: {reason}" in first.text, first.text
    assert f"rank 1 failed while it read its data: {reason}" in second.text, second.text
    assert "Traceback" not in first.text + second.text


@pytest.fixture
def hands(tmp_path: Path, bench: Bench, large: Path) -> Iterator[Hands]:
    """Return ranks whose data is in the cache; one with another cache reads it anew."""
    made = Hands(tmp_path, bench.model, large)
    yield made
    for process in made.started:
        process.end()


def start_rank(hands: Hands, number: int, deadline: float) -> Process:
    settings = (f"exchange.join_deadline={deadline}", "data.max_seq_len=64")
    options = [option for setting in settings for option in ("--set", setting)]
    return hands.rank(number, "--num-classes", "5", "--max-steps", "2", *options)


def start_coordinator(cluster: Cluster, data: Path, deadline: float) -> Process:
    configure(cluster, data, deadline)
    return cluster.coordinator(expect=1)


def configure(cluster: Cluster, data: Path, deadline: float) -> None:
    cluster.configure(
        data__train=str(data), exchange__join_deadline=deadline, training__max_steps=2
    )


def start_slow_coordinator(
    cluster: Cluster,
    data: Path,
    cache: HeldCache,
    deadline: float,
    monkeypatch: pytest.MonkeyPatch,
) -> Process:
    """Start one that waits for a cache, and let it wait."""
    configure(cluster, data, deadline)
    monkeypatch.setenv("MOTLEY_CACHE", str(cache.folder))
    return cluster.coordinator(1, listening=False)


def start_worker(cluster: Cluster, cache: Path) -> Process:
    """Start one that has a cache of its own, as on another host."""
    return cluster.torch_worker(
        0,
        *("--gpu-backend", "cpu"),
        *(("--tls", str(cluster.bench.tls / "rank-0")) if cluster.certified else ()),
        MOTLEY_CACHE=str(cache),
    )
