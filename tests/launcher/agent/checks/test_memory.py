"""How fast layers are read that do not stay in memory, on the host that is asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.agent.checks import memory
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host_speeds import measure_products, measure_read
from launcher.agent.checks.memory import check_layers, check_memory
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from tests.launcher.hollow_model import make_model
from trainer.config.run import load_config
from trainer.planning.workers import Room, RunMemory
from trainer.system.backends import Backend
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import TinyModel

SETTING = PlanContext(run_id="run-1", trainer_command=("t",), state_folder="/s", routes={})
LAYERS = 40


def find_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: float, **settings: object
) -> Finding:
    """Return what is found where a part of what all layers would need is free."""
    cpu = Host(name="localhost", connection="local", devices=(Device("cpu", "cpu"),))
    given = {"model.path": str(folder), "data.max_seq_len": 32, "lora.lora_rank": 1} | settings
    config = load_config("quickstart", given)
    free = int(part * RunMemory.of_model_folder(folder, config).needed_bytes("cpu") / 0.9)
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    return check_layers(place_run([cpu], config, None, SETTING), config, ["localhost"])


def test_layers_that_stay_are_not_read(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "measure_read", lambda _: pytest.fail("nothing is read"))
    found = find_layers(tiny_model(num_hidden_layers=LAYERS), monkeypatch, 1.5)
    assert found == Finding("ok", "all stay in memory")


@pytest.mark.parametrize("settings", [{}, {"task": "dpo", "num_classes": None}])
def test_layers_that_do_not_fit_are_read_and_products_are_timed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Also of a run that Vulkan refuses."""
    found = find_layers(tiny_model(num_hidden_layers=LAYERS), monkeypatch, 1.0, **settings)
    said = re.match(
        rf"(\d+) of {LAYERS} layers resident, (\d+) streamed from the disk at [\d.e+]+ GB/s;"
        r" free from [\d,]+ tokens a pass.*; products at [\d.e+]+ GFLOP/s",
        found.detail,
    )
    assert said is not None, found.detail
    assert int(said[1]) + int(said[2]) == LAYERS > int(said[1])
    assert found.status == ("warn" if "of computing speed" in found.detail else "ok")


@pytest.mark.parametrize(
    ("rate", "settings", "status", "said"),
    [
        (
            1e9,
            {},
            "ok",
            r"at 1 GB/s; free from [\d,]+ tokens a pass, and it has [\d,]+; products at",
        ),
        (
            6e6,
            {"training.micro_batch_size": 1, "training.batch_size": 1},
            "warn",
            r"at 0\.006 GB/s; free from [\d,]+ tokens a pass: with 32 0\.\d+ of computing speed;"
            r" move the model to NVMe, or training.batch_size \d+; products at 1 GFLOP/s",
        ),
        (
            6e6,
            {"training.micro_batch_size": 1, "training.batch_size": 16},
            "ok",
            r"a pass, and it has \d{3}; products at",
        ),
        (1e3, {"training.micro_batch_size": 1}, "warn", r"speed; move the model to NVMe; products"),
    ],
)
def test_a_slow_disk_is_a_warning_with_what_would_help(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    settings: dict[str, object],
    status: str,
    said: str,
) -> None:
    monkeypatch.setattr(memory, "measure_read", lambda _: rate)
    monkeypatch.setattr(memory, "measure_products", lambda: 1e9)
    folder = tiny_model(num_hidden_layers=LAYERS)
    found = find_layers(folder, monkeypatch, 1.0, **settings)
    assert found.status == status, found.detail
    assert re.search(said, found.detail), found.detail


@pytest.mark.parametrize(
    ("backend", "title"),
    [("cuda", "NVIDIA GeForce RTX 4090"), ("wgpu", "AMD Radeon Pro W5700X")],
)
def test_a_card_reads_the_layers_that_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, title: str
) -> None:
    """The host has memory for the base, so the disk is read for its speed alone."""
    folder = make_model(tmp_path)
    given = {"model.path": str(folder), "data.max_seq_len": 64, "lora.lora_rank": 1}
    config = load_config("quickstart", given | {"model.dtype": "bfloat16"})
    monkeypatch.setattr(memory, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(memory, "measure_read", lambda _: 1e9)
    size = RunMemory.of_model_folder(folder, config).needed_bytes(backend)
    share = Room(1 << 40, backend).usable / (1 << 40)
    card = Device(backend, "GPU-1", title, int(size / share) - (64 << 20))
    host = Host(name="localhost", connection="local", devices=(card,))
    plan = place_run([host], config, None, SETTING)
    assert check_memory(plan, config, ["localhost"]).status == "ok"
    said = check_layers(plan, config, ["localhost"]).detail
    streamed = r"worker-0: \d of 4 layers resident, \d streamed from memory at 25 GB/s; free from"
    assert re.match(streamed, said), said
    assert (" but for copies, " in said) == (backend == "wgpu")


def test_a_file_is_read_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(24 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert 0 < measure_read([path]) < 1e12
    assert 0 < measure_read([path], seconds=0) < 1e12, "the first chunk is enough"
    path.chmod(0)
    path.unlink()
    with pytest.raises((InputError, OSError)):
        measure_read([path])


def test_products_are_computed() -> None:
    assert measure_products(0.01) > 1e8
