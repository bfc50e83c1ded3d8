"""Workers that read the layers of their base beside one that keeps them, and faults of their files.

With 4 layers and none resident a worker reads 2 of them in each direction of each step.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.real_cluster import Bench, Cluster
from tests.waiting import wait_for
from trainer.init_model import ModelSizes, init_model

pytestmark = [pytest.mark.cluster, pytest.mark.needs("cc")]

LAYERS = 4
SETTINGS: dict[str, Any] = {
    "method": "lora",
    "lora__lora_rank": 4,
    "training__epochs": 500,
    "exchange__join_deadline": 250.0,
    "exchange__step_deadline": 250.0,  # on a busy machine a shard on llvmpipe may take seconds
}
CPU = ("--gpu-backend", "cpu")
STREAMED = ("--set", "model.resident=0")


@pytest.fixture(scope="module")
def deep(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return the inputs with a model of more layers than a reader has slots."""
    sizes = ModelSizes(
        hidden_size=64,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
    )
    model = init_model(bench.train, tmp_path_factory.mktemp("deep") / "model", sizes, 0)
    return replace(bench, model=model)


@pytest.fixture
def run(deep: Bench, tmp_path: Path) -> Iterator[Cluster]:
    """Return a run that leaves nothing running."""
    made = Cluster(deep, tmp_path)
    made.configure(**SETTINGS)
    try:
        yield made
    finally:
        made.end()
        print(made.logs())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled `read_faults.c`."""
    made = tmp_path_factory.mktemp("library") / "read_faults.so"
    source = Path(__file__).with_name("read_faults.c")
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", made], check=True)
    return made


@pytest.fixture
def faulty(library: Path, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process whose reads fail as a folder of it orders."""
    folder = tmp_path / "faults"
    folder.mkdir()
    return {"LD_PRELOAD": str(library), "READ_FAULTS": str(folder)}


def order(faulty: dict[str, str], fault: str) -> None:
    Path(faulty["READ_FAULTS"], fault).touch()


def finish(run: Cluster, ranks: list[int]) -> None:
    """Stop a run after some steps more, and check what it has trained."""
    run.wait_step(run.step + 3)
    run.processes[0].signal(signal.SIGTERM)
    assert run.processes[0].wait() == 0
    run.check_contracts_so_far(ranks)


def list_ranks(step: dict[str, Any]) -> set[int]:
    """Return the workers of which a step has samples."""
    return {rank for rank, *_ in step["sample_ranges"]}


@pytest.mark.usefixtures("vulkan")
def test_one_is_killed_in_the_middle_of_a_step_and_comes_back(
    run: Cluster, faulty: dict[str, str]
) -> None:
    run.coordinator(3)
    run.torch_worker(0, *CPU, "--set", "model.resident=all")
    dying = run.torch_worker(1, *CPU, *STREAMED, **faulty)
    run.torch_worker(2, "--gpu-backend", "wgpu", *STREAMED)
    wait_for(lambda: run.step >= 3, "all joined", run, 250)
    joined = {event["rank"]: event for event in run.events("joined")}
    assert {rank: event["backend"] for rank, event in joined.items()} == {
        0: "cpu",
        1: "cpu",
        2: "wgpu",
    }
    reasons = [joined[rank]["backend_reason"] for rank in range(3)]
    assert reasons == ["", *[f"0 of {LAYERS} layers resident, {LAYERS} streamed"] * 2]
    order(faulty, "SIGKILL")  # a worker reads only while it computes
    assert dying.wait() == -signal.SIGKILL
    lost = run.wait_event("lost", rank=1)["step"]
    run.wait_step(lost + 1)
    assert list_ranks(run.records("step")[lost]) == {0, 2}
    run.torch_worker(1, *CPU, *STREAMED)
    back = run.wait_event("rejoined", rank=1)["step"]
    wait_for(
        lambda: any(list_ranks(step) == {0, 1, 2} for step in run.records("step")[back:]),
        "a step of all",
        run,
        250,
    )
    finish(run, [0, 1, 2])


def cut(file: Path, _faulty: dict[str, str]) -> None:
    os.truncate(file, 4096)


def exchange_file(file: Path, _faulty: dict[str, str]) -> None:
    again = Path(shutil.copy(file, file.with_name("again")))
    again.replace(file)


def break_disk(_file: Path, faulty: dict[str, str]) -> None:
    order(faulty, "EIO")


TRUNCATED = "cannot be read: the file is truncated, download or copy it again"
REBUILT = "cannot be read: the file is truncated, start again: the cache is rebuilt"


@pytest.mark.parametrize(
    ("inject", "backend", "quantization", "words"),
    [
        (cut, "cpu", "none", TRUNCATED),
        (cut, "cpu", "nf4", REBUILT),
        (cut, "wgpu", "none", TRUNCATED),
        (exchange_file, "cpu", "none", "was read; start the worker again"),
        (break_disk, "cpu", "none", "cannot be read: Input/output error"),
    ],
)
def test_a_file_that_fails_ends_its_worker_with_one_line_and_the_run_goes_on(
    request: pytest.FixtureRequest,
    run: Cluster,
    faulty: dict[str, str],
    tmp_path: Path,
    inject: Callable[[Path, dict[str, str]], None],
    backend: str,
    quantization: str,
    words: str,
) -> None:
    if backend == "wgpu":
        request.getfixturevalue("vulkan")
    run.configure(**SETTINGS, model__quantization=quantization)
    own, cache = shutil.copytree(run.bench.model, tmp_path / "own"), tmp_path / "cache"
    run.coordinator(2)
    run.torch_worker(0, *CPU)
    flags = ("--gpu-backend", backend, *STREAMED, "--set", f"model.path={own}")
    worker = run.torch_worker(1, *flags, **faulty, MOTLEY_CACHE=str(cache))
    wait_for(lambda: run.step >= 3, "both joined", run, 250)
    (file,) = (own if quantization == "none" else cache).rglob("*.safetensors")
    inject(file, faulty)
    assert worker.wait() == 2
    last = worker.text.splitlines()[-1]
    assert re.search(rf"{re.escape(str(file))}: .*{words}$", last)
    assert "Traceback" not in worker.text
    lost = run.wait_event("lost", rank=1)["step"]
    finish(run, [0])
    assert all(list_ranks(step) == {0} for step in run.records("step")[lost:])
