"""A teacher on a Vulkan device: torch's logits, and those of a resident model for any number."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.covering import covering
from tests.trainer.small_teacher import WIDE_SIZES, write_corpus, write_teacher
from trainer.commands.distill.audit import audit
from trainer.commands.distill.generate import generate
from trainer.commands.distill.teacher import teacher
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.teacher import wgpu_engine
from trainer.distill.teacher.engines import Engine
from trainer.distill.teacher.torch_author import open_generate
from trainer.distill.teacher.torch_engine import open_torch
from trainer.distill.teacher.wgpu_engine import WgpuEngine, open_wgpu
from trainer.distill.workload import read_measured
from trainer.planning import stored_layers
from trainer.planning.forward import ForwardSize, frozen_setup
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.vulkan import USABLE
from trainer.planning.vulkan_buffers import BINDING_BYTES, padded_length
from trainer.planning.vulkan_workers import plan_vulkan_forward
from trainer.replica import residence
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.replica.wgpu import batch as packing
from trainer.replica.wgpu import loaded_model
from trainer.replica.wgpu.batch import Bucket
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.config.run import Quantization, Resident
    from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter

FORWARD = ForwardSize(144, 48)
LENGTHS = [(9, 1, 33, 2), (48,), (40, 40), (20, 17)]
STREAMED = [
    (family, stored, dtype, quantization, resident)
    for family in ("qwen3", "llama")
    for stored in ("float32", "bfloat16")
    for dtype in ("float32", "bfloat16")
    for quantization in ("none", "nf4")
    for resident in (0, 1, 3)
]


@pytest.fixture(scope="module")
def device(vulkan: Adapter) -> Device:
    return Device(vulkan)


@pytest.fixture
def opened(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open one device, which compiles each kernel once."""
    monkeypatch.setattr(wgpu_engine, "open_vulkan_device", lambda *_, **__: device)


def batches() -> list[list[np.ndarray]]:
    draw = np.random.default_rng(3)
    return [
        [draw.integers(300, size=length).astype(np.int32) for length in lengths]
        for lengths in LENGTHS
    ]


def logits_of(engine: Engine) -> list[np.ndarray]:
    return [
        torch.cat([part.clone() for part in engine.iterate_logits(batch)]).numpy()
        for batch in batches()
    ]


def load(
    folder: Path,
    dtype: str = "float32",
    resident: Resident = "auto",
    quantization: Quantization = "none",
) -> WgpuEngine:
    return open_wgpu(folder, dtype, Compute("wgpu", resident=resident), FORWARD, quantization)


def count_streamed(engine: WgpuEngine) -> int:
    uploads = engine._loaded.uploads
    return 0 if uploads is None else len(uploads._order)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("family", "stored", "dtype", "quantization", "resident"), covering(STREAMED)
)
def test_logits_are_those_of_torch_and_of_the_resident_teacher(
    tiny_model: Any,
    family: str,
    stored: str,
    dtype: str,
    quantization: Quantization,
    resident: int,
) -> None:
    folder = tiny_model(family, dtype=stored, num_hidden_layers=4, tie_word_embeddings=False)
    whole = load(folder, dtype, "all", quantization)
    some = load(folder, dtype, resident, quantization)
    assert (count_streamed(whole), count_streamed(some)) == (0, 4 - resident)
    found = logits_of(whole)
    assert [each.tobytes() for each in logits_of(some)] == [each.tobytes() for each in found]
    assert [len(each) for each in found] == [sum(each) - len(each) for each in LENGTHS]
    judge = open_torch(folder, "float32", Compute("cpu", threads=1), FORWARD, quantization)
    near = 1e-4 if dtype == "float32" or stored == dtype else 0.05
    for mine, theirs in zip(found, logits_of(judge), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=near * np.abs(theirs).max())


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("family", "stored", "dtype", "tied"),
    covering(
        (family, stored, dtype, tied)
        for family in ("qwen3", "llama")
        for stored in ("float32", "bfloat16", "float16")
        for dtype in ("float32", "bfloat16")
        for tied in (True, False)
    ),
)
def test_logits_of_a_head_that_is_read_are_those_of_the_resident_teacher(
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    stored: str,
    dtype: str,
    tied: bool,
) -> None:
    """Ten chunks of the head, each once for every chunk of 64 targets."""
    folder = tiny_model(family, dtype=stored, num_hidden_layers=4, tie_word_embeddings=tied)
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", 32 * 64)
    monkeypatch.setattr(packing, "CHUNK_ROWS", 64)
    expected = [each.tobytes() for each in logits_of(load(folder, dtype, "all"))]
    monkeypatch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))
    engine = load(folder, dtype, 0)
    assert [each.tobytes() for each in logits_of(engine)] == expected
    assert count_streamed(engine) == 4 + 10


@pytest.mark.usefixtures("opened")
def test_memory_decides_which_layers_stay(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The head stays if the least forward fits beside it."""
    caplog.set_level("INFO")
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", 32 * 64)
    folder = tiny_model("qwen3", num_hidden_layers=8)
    planned: list[int] = []
    check = loaded_model.choose_layers

    def keep(model_dir: Path, asked: Resident, device: Device, plan: Any, least: Any) -> int | None:
        planned[:] = [plan(1, some).total for some in (None, 3, 0)]
        planned.extend(least(some).total for some in (0, HEAD_STREAMED))
        return check(model_dir, asked, device, plan, least)

    monkeypatch.setattr(wgpu_engine, "choose_layers", keep)
    expected = logits_of(load(folder))
    whole, three, none, kept, least = planned
    assert least < kept < none < three < whole
    cases = [(whole, None), (three, 3), (none, 0), (kept, 0), (kept - 4, -1), (least, -1)]
    for free, resident in cases:
        memory = math.ceil(free / USABLE)
        monkeypatch.setattr(loaded_model, "measure_available_memory", lambda _, free=memory: free)
        caplog.clear()
        engine, stay = load(folder), max(0, resident or 0)
        streamed = 8 + 10 if resident == HEAD_STREAMED else 8 - stay
        assert count_streamed(engine) == (0 if resident is None else streamed)
        head = "each use, and so is the head" if resident == HEAD_STREAMED else "each use\n"
        line = rf"wgpu:\d: {stay} of 8 layers stay in memory, {8 - stay} are read .* {head}"
        assert bool(re.search(line, caplog.text)) == (resident is not None)
        assert [a.tobytes() for a in logits_of(engine)] == [b.tobytes() for b in expected]
    with pytest.raises(InputError, match=r"are free; use --resident auto or fewer tokens$"):
        load(folder, resident="all")
    monkeypatch.setattr(loaded_model, "measure_available_memory", lambda _: least - 4)
    with pytest.raises(InputError, match=r"are free; use fewer tokens$"):
        load(folder)


@pytest.mark.parametrize(
    ("tied", "dtype", "quantization"),
    [
        (True, "float32", "none"),
        (False, "float32", "none"),
        (False, "bfloat16", "none"),
        (True, "bfloat16", "nf4"),
    ],
)
def test_a_plan_of_sizes_is_what_a_forward_takes(
    tiny_model: Any, tied: bool, dtype: str, quantization: Quantization
) -> None:
    """`launch plan --distill` knows sizes alone, and the least that a binding may span."""
    sizes = {"vocab_size": 9000, "tie_word_embeddings": tied}
    folder = tiny_model("qwen2", num_hidden_layers=4, **sizes)
    size = ForwardSize(96, 20)
    config, layout = wgpu_engine._freeze_all(folder, dtype, quantization, size.length)
    setup = frozen_setup(4 if dtype == "float32" else 2, quantization)
    for resident in (None, 3, 0):
        pool = MemoryPool(None)
        decoder = loaded_model.plan_decoder(folder, config, layout, pool, resident)
        bucket = Bucket(4, padded_length(size.length), classify=False)
        wgpu_engine._record_forward(pool, decoder, bucket, BINDING_BYTES)
        taken = pool.report_budget()
        planned = plan_vulkan_forward(read_shape(folder), setup, size, resident)
        assert (planned.weights, planned.total) == (taken.parts["frozen"], taken.total)


def test_a_batch_that_no_kernel_can_span_is_for_a_smaller_one(
    tiny_model: Any, vulkan: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Device(vulkan, binding_limit=256 << 10)
    monkeypatch.setattr(wgpu_engine, "open_vulkan_device", lambda *_, **__: narrow)
    engine = open_wgpu(tiny_model("qwen3"), "float32", Compute("wgpu"), ForwardSize(16, 16))
    ids = np.arange(16, dtype=np.int32)
    assert sum(len(part) for part in engine.iterate_logits([ids] * 4)) == 60
    with pytest.raises(MemoryError):
        list(engine.iterate_logits([ids] * 100))
    with pytest.raises(InputError, match="a window of 608 tokens exceeds the 0 MiB"):
        open_wgpu(tiny_model("qwen3"), "float32", Compute("wgpu"), ForwardSize(16, 600))


@pytest.mark.usefixtures("opened")
def test_a_file_that_is_cut_ends_a_teacher_with_one_line(tiny_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3", num_hidden_layers=6), folder)
    engine = load(folder, resident=1)
    logits_of(engine)
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: layer \d .*trunc") as caught:
        logits_of(engine)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_answers_are_those_of_torch_and_of_the_resident_teacher(
    tiny_model: Any, quantization: Quantization
) -> None:
    folder = tiny_model("qwen3", num_hidden_layers=4)
    prompts = [[5, 6, 7], [8], list(range(20))]
    options: dict[str, Any] = {"max_new_tokens": 5, "sampling": Sampling(temperature=1, seed=2)}
    found = [
        open_generate(folder, "float32", compute, 2, 25, None, quantization)(prompts, **options)
        for compute in (
            Compute("wgpu", resident="all"),
            Compute("wgpu", resident=1),
            Compute("cpu", threads=1),
        )
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("vulkan")
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_the_commands_of_a_distillation(tmp_path: Path, quantization: str) -> None:
    """Scores come with the distance from transformers'; another engine finds them its own."""
    corpus = write_corpus(tmp_path / "texts.jsonl", 12)
    model = write_teacher(tmp_path / "model", corpus, sizes=WIDE_SIZES)
    logits, where = tmp_path / "logits", ["--gpu-backend", "wgpu", "--resident", "1"]

    def call(command: Any, *words: Any) -> str:
        done = CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    scoring = [model, "--data", corpus, "--out", logits, "--dtype", "float32", "--max-seq-len", 64]
    scoring += ["--quantization", quantization]
    call(teacher, *scoring, "--batch-tokens", 128, "--engine", "wgpu", *where)
    described = LogitsFolder(logits).description.teacher
    assert (described.engine, described.quantization) == ("wgpu", quantization)
    assert described.kl is not None
    assert described.kl < 1e-6
    (state,) = (json.loads(path.read_bytes()) for path in (logits / "teachers").glob("*.json"))
    assert state["device"].startswith("wgpu:")
    assert [one.place for one in read_measured(logits)] == ["wgpu"]
    call(audit, logits, "--fraction", 1, "--gpu-backend", "cpu", "--engine", "torch")
    call(audit, logits, "--fraction", 1, "--engine", "wgpu", *where)
    answers = tmp_path / "answers"
    call(generate, model, "--prompts", corpus, "--out", answers, "--max-new-tokens", 3, *where)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gpu-backend", "wgpu"], "the engine torch computes on cpu and cuda, not on wgpu; take"),
        (["--engine", "wgpu", "--gpu-backend", "cpu"], "the engine wgpu computes on wgpu, not on"),
    ],
)
def test_an_engine_refuses_another_backend(tmp_path: Path, words: list[str], why: str) -> None:
    corpus = write_corpus(tmp_path / "texts.jsonl", 2)
    model = write_teacher(tmp_path / "model", corpus)
    command = [str(model), "--data", str(corpus), "--out", str(tmp_path / "out"), *words]
    result = CliRunner().invoke(teacher, command)
    assert why in str(result.exception)
    assert not (tmp_path / "out" / "manifest.json").exists()
