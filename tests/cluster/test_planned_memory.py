"""Planned memory beside what real processes take: a coordinator, a worker, a group's leader.

What a process takes is its private memory, less what the same process takes in a run of a model
with almost no weights: Python, libraries, and what they keep.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rig.resident import EXACT
from tests.cluster.real_cluster import Bench, Cluster
from tests.cluster.real_process import Process
from tests.waiting import PATIENCE, wait_for
from trainer.config.run import RunConfig, load_config
from trainer.init_model import ModelSizes, init_model
from trainer.model.layout import GradientLayout, build_layout
from trainer.planning.workers import RunMemory, coordinator_memory

pytestmark = pytest.mark.cluster

LARGE = ModelSizes(
    hidden_size=256,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=512,
)
"""8.5 million weights: a vector of 34 MB."""
WORKERS, STEPS = 4, 3
ALONE = {"PYTHONPATH": str(Path.cwd()), **EXACT}
"""For a process that is started and not forked, which returns at once what it frees."""


class OwnMemory:
    """The private bytes of a process, and the most that there were, watched by a thread."""

    def __init__(self, process: Process) -> None:
        self._rollup = Path(f"/proc/{process.pid}/smaps_rollup")
        self.most = self.now()

    def now(self) -> int:
        """Return the bytes of this moment; 0 after the end."""
        with suppress(FileNotFoundError, ProcessLookupError):
            found = re.findall(r"^Private_\w+:\s+(\d+) kB$", self._rollup.read_text(), re.M)
            return 1024 * sum(map(int, found))
        return 0

    @contextmanager
    def watched(self) -> Iterator[OwnMemory]:
        """Keep `most` up to date."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                self.most = max(self.most, self.now())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()


@pytest.fixture(scope="module")
def large(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return the bench with a model whose weights outweigh a process."""
    folder = tmp_path_factory.mktemp("large")
    init_model(bench.train, folder / "model", LARGE, 0)
    return replace(bench, model=folder / "model")


@pytest.fixture
def clusters(bench: Bench, large: Bench, tmp_path: Path) -> Iterator[tuple[Cluster, Cluster]]:
    """Return a cluster with almost no weights, and one of the large model; both over TCP."""
    made = Cluster(bench, tmp_path, "small"), Cluster(large, tmp_path, "large")
    try:
        yield made
    finally:
        for cluster in made:
            cluster.end()
            print(cluster.logs())


def of_run(cluster: Cluster) -> tuple[RunConfig, GradientLayout]:
    """Return a cluster's config and layout."""
    config = load_config(cluster.run_file)
    return config, build_layout(cluster.bench.model, config)


def settings(codec: str) -> dict[str, object]:
    """Return the settings of a few steps without checkpoints before the end."""
    return {
        "exchange__codec": codec,
        "exchange__shared_memory": False,
        "exchange__step_deadline": PATIENCE,
        "checkpoint__every": 1000,
        "training__max_steps": STEPS,
        "training__micro_batch_size": 4,
        "training__gradient_checkpointing": "off",
    }


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_coordinator_takes_what_is_planned_when_the_first_worker_is_late(
    codec: str, clusters: tuple[Cluster, Cluster]
) -> None:
    """The gradients of all others wait for it."""
    small, large = clusters
    libraries = most_while_the_first_waits(small, codec, 0)
    large.configure(**settings(codec))
    config, layout = of_run(large)
    planned = coordinator_memory(layout, WORKERS, config.exchange)
    taken = most_while_the_first_waits(large, codec, libraries + int(0.9 * planned)) - libraries
    assert taken < 1.1 * planned
    large.check_contracts_so_far(list(range(WORKERS)))


def most_while_the_first_waits(cluster: Cluster, codec: str, least: int) -> int:
    """Return the most bytes of a coordinator, whose first worker waits until it has `least`."""
    cluster.configure(**settings(codec))
    gate = cluster.folder / "gate"
    coordinator = cluster.coordinator(WORKERS)
    with OwnMemory(coordinator).watched() as own:
        for rank in range(WORKERS):
            cluster.worker(rank, *(("--gate", f"{STEPS - 1}:{gate}") if rank == 0 else ()))
        cluster.wait_step(STEPS - 1)
        wait_for(lambda: own.now() > least, f"the coordinator takes {least:,} bytes", cluster)
        gate.touch()
        assert coordinator.wait() == 0
    return own.most


def test_what_came_in_its_turn_is_one_vector(clusters: tuple[Cluster, Cluster]) -> None:
    """20 bytes a weight: weights, two moments, the sum, and one for what is on its way."""
    libraries, most = map(most_while_the_last_waits, clusters)
    assert most - libraries < 20 * of_run(clusters[1])[1].size
    clusters[1].check_contracts_so_far([WORKERS - 1])


def most_while_the_last_waits(cluster: Cluster) -> int:
    """Return the most bytes of a coordinator whose other workers die when all was sent."""
    cluster.configure(**settings("fp32"))
    gate, last = cluster.folder / "gate", WORKERS - 1
    coordinator = cluster.coordinator(WORKERS)
    with OwnMemory(coordinator).watched() as own:
        for rank in range(last):
            cluster.worker(rank, "--die", "1:uploaded")
        cluster.worker(last, "--gate", f"1:{gate}")
        for rank in range(last):
            cluster.wait_event("lost", rank=rank)
        gate.touch()
        assert coordinator.wait() == 0
    return own.most


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_worker_and_the_leader_of_a_group_take_what_is_planned(
    codec: str, clusters: tuple[Cluster, Cluster]
) -> None:
    """Plan few tokens: an average comes when the activations are gone, unless a worker was lost."""
    few = {"training__batch_size": 4, "training__micro_batch_size": 1, "data__max_seq_len": 16}
    found: list[list[int]] = []
    for cluster in clusters:
        cluster.configure(**settings(codec) | few)
        cluster.coordinator(2)
        group = ("--gpu-backend", "cpu", "--gpus", "0,1", "--strategy", "ddp")
        leader = cluster.torch_worker(0, *group, **ALONE)
        worker = cluster.torch_worker(1, "--gpu-backend", "cpu", **ALONE)
        with OwnMemory(leader).watched() as of_leader, OwnMemory(worker).watched() as of_worker:
            assert [process.wait(2 * PATIENCE) for process in cluster.processes] == [0, 0, 0]
        found.append([of_leader.most, of_worker.most])
    config, _ = of_run(cluster)
    planned = RunMemory.of_model_folder(cluster.bench.model, config).needed_bytes("cpu", 16)
    taken = [of_large - of_small for of_small, of_large in zip(*found, strict=True)]
    assert taken == pytest.approx([planned, planned], rel=0.1)
