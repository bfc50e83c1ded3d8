"""Eval runners as processes: two at once, killed, stopped, and beside a run that prunes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.real_cluster import Bench, Cluster
from tests.cluster.real_process import Process
from tests.trainer.small_teacher import write_corpus, write_teacher
from tests.waiting import wait_for
from trainer.checkpoint.reader import BEST_EVALUATED, complete_checkpoints
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.checkpoint.trained_model import load_trained
from trainer.config.run import load_config
from trainer.distill.logits.dataset import LogitsFolder
from trainer.evaluate.results import read_evaluations
from trainer.evaluate.scoring import score_file
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState
from trainer.replica.backend import Compute
from trainer.system.storage.atomic_folder import verify_folder
from trainer.system.storage.lease_folder import lease_path, newest_lease, read_holder

pytestmark = pytest.mark.cluster


class Trainee:
    """A run whose checkpoints this process saves, and runners that watch it."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder
        self.output = folder / "output"
        self.processes: list[Process] = []

    def store(self, output: Path | None = None, keep_last: int = 100) -> CheckpointStore:
        settings = {
            "task": "causal-lm",
            "method": "full",
            "model.path": str(self.bench.model),
            "data.train": "none",
            "data.max_seq_len": 64,
            "checkpoint.keep_last": keep_last,
        }
        self.config = load_config(None, settings)
        self.layout = build_layout(self.bench.model, self.config)
        self.weights = initial_weights(self.layout, self.bench.model, self.config)
        place = (output or self.output) / "checkpoints"
        return CheckpointStore(place, self.layout, self.config, self.bench.model)

    def save(self, store: CheckpointStore, step: int) -> Path:
        noise = draw_uniform(step, "noise", self.weights.size, 0.01)
        zeros = np.zeros_like(self.weights)
        state = TrainState(self.weights + noise, zeros, zeros.copy(), step=step)
        tree = self.config.model_dump(mode="json")
        return store.save(state.take_snapshot(), RunProgress("run", step, 0, 8, 0, 0, tree))

    def status(self, state: str) -> None:
        self.output.mkdir(exist_ok=True)
        tree = {"schema": "motley.status/2", "state": state}
        (self.output / "status.json").write_text(json.dumps(tree))

    def runner(self, name: str, *flags: str, timeout: float = 60.0, **environment: str) -> Process:
        """Start one on the CPU, unless the flags say otherwise."""
        command = [sys.executable, "-m", "trainer.cli", "evaluate", "--watch", str(self.output)]
        command += ["--data", str(self.bench.validation), "--gpu-backend", "cpu", "--threads", "1"]
        command += ["--runner", name, "--every", "0.2", "--claim-timeout", str(timeout), *flags]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        process = Process(name, command, self.folder, environment)
        self.processes.append(process)
        return process

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line, not only the first of each checkpoint."""
        path = self.output / "evaluations" / "evaluations.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def holders(self) -> list[tuple[int, str]]:
        """Return the number of the lease of each checkpoint, and the runner that had it last."""
        found: list[tuple[int, str]] = []
        for folder in (self.output / "evaluations" / "claims").glob("*"):
            if (number := newest_lease(folder)) is not None:
                holder, _ = read_holder(lease_path(folder, number))
                found.append((number, holder.run_id if holder else ""))
        return found

    @contextmanager
    def at_work(self, checkpoint: Path, name: str, timeout: float) -> Iterator[Process]:
        """Start a runner that stays between its claim and its result until the context ends.

        It cannot pin the checkpoint, which a lock says is being removed. That it has opened it
        shows that the claim is its own: the lease's file is there a moment before.
        """
        lock = os.open(checkpoint, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = self.runner(name, timeout=timeout)

            def has_claim() -> bool:
                claimed = any(runner == name for _, runner in self.holders())
                return claimed and str(checkpoint) in _open_files(process)

            wait_for(has_claim, f"{name} has a claim", self)
            yield process
        finally:
            os.close(lock)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.text[-3000:]}" for p in self.processes)


def _shown(output: Path) -> str:
    return (output / "checkpoints" / BEST_EVALUATED).readlink().name


def _open_files(process: Process) -> set[str]:
    files: set[str] = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            files.add(str(link.readlink()))
    return files


@pytest.fixture
def trainee(bench: Bench, tmp_path: Path) -> Iterator[Trainee]:
    made = Trainee(bench, tmp_path)
    try:
        yield made
    finally:
        for process in made.processes:
            process.end()
        print(made.logs())


def test_two_runners_never_score_one_twice(trainee: Trainee) -> None:
    """Many checkpoints appear at once; the ledger has each of them once, and both had some."""
    runners = [trainee.runner(name) for name in ("first", "second")]
    for process in runners:
        process.says("no checkpoint there, waiting")
    hidden = trainee.folder / "hidden"
    store = trainee.store(hidden)
    names = {trainee.save(store, step).name for step in range(1, 13)}
    hidden.rename(trainee.output)
    trainee.status("completed")
    assert [process.wait() for process in runners] == [0, 0]
    lines = trainee.lines
    assert len(lines) == len({line["digest"] for line in lines}) == 12
    assert {line["checkpoint"] for line in lines} == names
    assert {line["runner"] for line in lines} == {"first", "second"}
    assert {line["state"] for line in lines} == {"scored"}
    assert len(trainee.holders()) == 12
    best = min(lines, key=lambda line: line["tasks"]["loss"]["figures"]["loss"])
    assert _shown(trainee.output) == best["checkpoint"]


@pytest.mark.swiftshader
@pytest.mark.timeout(900)  # SwiftShader takes minutes to compile the kernels
def test_two_devices_of_a_host_divide_the_checkpoints(trainee: Trainee, two_drivers: str) -> None:
    """While the CPU teaches. Two drivers stand in for two cards; the figures are the CPU's."""
    corpus = write_corpus(trainee.folder / "texts.jsonl")
    model, logits = write_teacher(trainee.folder / "model", corpus), trainee.folder / "logits"
    command = [sys.executable, "-m", "trainer.cli", "distill", "teacher", str(model), "--stay"]
    command += ["--data", str(corpus), "--out", str(logits), "--dtype", "float32"]
    command += ["--gpu-backend", "cpu", "--threads", "1", "--shard-bytes", "600"]
    teacher = Process("teacher", command, trainee.folder, {})
    trainee.processes.append(teacher)
    runners = [
        trainee.runner(name, "--gpu-backend", "wgpu", "--gpu", name, VK_DRIVER_FILES=two_drivers)
        for name in ("llvmpipe", "SwiftShader")
    ]
    for process in runners:
        process.says("no checkpoint there, waiting")
    hidden = trainee.folder / "hidden"
    store = trainee.store(hidden)
    names = {trainee.save(store, step).name for step in range(1, 7)}
    hidden.rename(trainee.output)
    trainee.status("completed")
    assert [process.wait(600) for process in runners] == [0, 0]
    teacher.says("is on cpu")
    wait_for(lambda: not LogitsFolder(logits).list_missing(), "the teacher's scores", trainee)
    teacher.signal(signal.SIGTERM)
    assert teacher.wait() == 0
    lines = trainee.lines
    assert sorted(line["checkpoint"] for line in lines) == sorted(names)
    assert {line["runner"] for line in lines} == {"llvmpipe", "SwiftShader"}
    for line in lines:
        trained = load_trained(trainee.output / "checkpoints" / line["checkpoint"])
        right = score_file(trained, trainee.bench.validation, Compute("cpu", threads=1))
        assert line["tasks"]["loss"]["figures"]["loss"] == pytest.approx(right.loss, rel=1e-5)


def test_kill_9_in_the_middle_and_another_takes_over(trainee: Trainee) -> None:
    saved = trainee.save(trainee.store(), 1)
    trainee.status("completed")
    with trainee.at_work(saved, "first", timeout=3) as first:
        first.kill()
    assert not trainee.lines
    second = trainee.runner("second", timeout=3)
    assert second.wait() == 0
    (line,) = trainee.lines
    assert line["runner"] == "second"
    assert trainee.holders() == [(2, "second")]


def test_a_runner_that_slept_comes_too_late(trainee: Trainee) -> None:
    saved = trainee.save(trainee.store(), 1)
    trainee.status("completed")
    with trainee.at_work(saved, "first", timeout=3) as first:
        first.signal(signal.SIGSTOP)
    second = trainee.runner("second", timeout=3)
    assert second.wait() == 0
    first.signal(signal.SIGCONT)
    assert first.wait() == 0
    assert "this result is discarded" in first.text
    assert [line["runner"] for line in trainee.lines] == ["second"]


def test_sigterm_gives_the_claim_back(trainee: Trainee) -> None:
    """The second need not wait for the claim to expire: it would be an hour."""
    saved = trainee.save(trainee.store(), 1)
    trainee.status("completed")
    with trainee.at_work(saved, "first", timeout=3600) as first:
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    assert "Traceback" not in first.text
    assert trainee.runner("second", timeout=3600).wait() == 0
    assert [line["runner"] for line in trainee.lines] == ["second"]


def test_pruned_while_it_is_scored(trainee: Trainee) -> None:
    """The run saves on and prunes: what a runner reads stays, and then goes."""
    store = trainee.store(keep_last=1)
    held = trainee.save(store, 1)
    runner = trainee.runner("runner")
    wait_for(lambda: str(held) in _open_files(runner), "the runner reads it", trainee)
    runner.signal(signal.SIGSTOP)
    for step in (2, 3, 4):
        trainee.save(store, step)
    verify_folder(held)
    assert [path.name for path in complete_checkpoints(store.folder)] == [
        "step-000004",
        "step-000001",
    ]
    runner.signal(signal.SIGCONT)
    trainee.status("completed")
    assert runner.wait() == 0
    assert [line["step"] for line in trainee.lines] == [1, 4]
    assert {line["state"] for line in trainee.lines} == {"scored"}
    trainee.save(store, 5)
    assert held.is_dir() == (_shown(trainee.output) == held.name)


@pytest.mark.smoke("distill")
def test_half_written_and_damaged_checkpoints_are_not_read(trainee: Trainee) -> None:
    store = trainee.store()
    whole = trainee.save(store, 1)
    damaged = trainee.save(store, 3)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    half = store.folder / "step-000002"
    shutil.copytree(whole, half, ignore=shutil.ignore_patterns("manifest.json"))
    runner = trainee.runner("runner")
    wait_for(lambda: trainee.lines, "step 1 is scored", trainee)
    shutil.rmtree(half)
    trainee.save(store, 2)
    trainee.status("completed")
    assert runner.wait() == 0
    assert [line["step"] for line in trainee.lines] == [1, 2]
    assert runner.text.count("step-000003/model.safetensors: it does not match") == 1


def test_the_folder_is_away_for_a_while(trainee: Trainee) -> None:
    store = trainee.store()
    trainee.save(store, 1)
    runner = trainee.runner("runner")
    wait_for(lambda: trainee.lines, "step 1 is scored", trainee)
    aside = trainee.output.rename(trainee.folder / "aside")
    runner.says("no checkpoint there, waiting")
    assert not trainee.output.exists(), "nothing is made in its place"
    aside.rename(trainee.output)
    trainee.save(store, 2)
    trainee.status("completed")
    assert runner.wait() == 0
    assert [line["step"] for line in trainee.lines] == [1, 2]


def test_beside_a_real_run_until_it_is_over(cluster: Cluster) -> None:
    """A fine-tune that validates and prunes has its `best`; the runner keeps its own link."""
    cluster.configure(
        training__epochs=2,
        checkpoint__every=4,
        checkpoint__keep_last=2,
        data__validation=str(cluster.bench.validation),
    )
    command = [sys.executable, "-m", "trainer.cli", "evaluate", "--watch", str(cluster.output)]
    command += ["--data", str(cluster.bench.validation), "--gpu-backend", "cpu", "--threads", "1"]
    runner = cluster.start("evaluate", [*command, "--every", "0.2"])
    runner.says("no checkpoint there, waiting")
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, "--seconds", "0.02")
    assert [process.wait() for process in (coordinator, worker, runner)] == [0, 0, 0]
    records = read_evaluations(cluster.output / "evaluations" / "evaluations.jsonl")
    saved = {event["step"] for event in cluster.events("checkpoint")}
    assert {record["step"] for record in records} <= saved
    kept = {int(path.name[5:]) for path in complete_checkpoints(cluster.output / "checkpoints")}
    scored = {record["step"] for record in records if record["state"] == "scored"}
    assert kept <= scored, "what is left has its figures"
    best = max(
        (record for record in records if record["state"] == "scored"),
        key=lambda record: (record["rating"], -record["step"]),
    )
    assert _shown(cluster.output) == best["checkpoint"]
    assert (cluster.output / "checkpoints" / "best").is_dir()
    assert "Traceback" not in runner.text
