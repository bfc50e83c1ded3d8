"""A head that is written to a device in chunks of its rows computes what one that stays does."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.covering import covering
from tests.trainer.replica.driving import gradient, taught, train
from tests.trainer.replica.torch.test_streaming import FORMATS, TASKS
from tests.trainer.replica.wgpu.test_streaming import GROUPS, LAYERS, record_reads, uploads_of
from trainer.data.tokens import Encoded
from trainer.model.layout import build_layout
from trainer.planning import stored_layers, vulkan, vulkan_buffers
from trainer.planning.resident_layers import HEAD_STREAMED, describe_residents
from trainer.planning.vulkan import USABLE
from trainer.replica import residence
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.replica.wgpu import batch as packing
from trainer.replica.wgpu import planning
from trainer.replica.wgpu.generation.generator import load_generator
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.planning import plan_memory
from trainer.replica.wgpu.replica import WgpuReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

ROWS, WIDTH, VOCABULARY, TARGETS = 32, 64, 300, 64
CHUNKS = -(-VOCABULARY // ROWS)
HEADS = covering(
    (family, task, form, tied, recompute, group)
    for family in ("qwen3", "llama")
    for task in ("causal-lm", "distillation", "freeze-a")
    for form in FORMATS
    if "products" not in form
    for tied in (True, False)
    for recompute in (True, False)
    for group in GROUPS
    if family == "qwen3" or form == "fp32"
    if task == "causal-lm" or group == "all"
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut heads of tiny models into ten chunks of two windows, and targets into chunks of 64."""
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", ROWS * WIDTH)
    monkeypatch.setattr(vulkan_buffers, "LOGIT_BYTES", 4 * TARGETS * ROWS // 2)
    for module in (packing, vulkan):
        monkeypatch.setattr(module, "CHUNK_ROWS", TARGETS)


@pytest.fixture
def reads_head(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model without resident layers read its head, whatever memory there is."""
    monkeypatch.setattr(residence, "stream_head", choose_streamed)


def draw_batch(count: int) -> list[Encoded]:
    """Return samples of 48 tokens at most, which are targets but for the first."""
    draw = np.random.default_rng(7)
    lengths = [48, *draw.integers(2, 49, count - 1)]
    drawn = [draw.integers(VOCABULARY, size=length).astype(np.int32) for length in lengths]
    return [Encoded(ids, ids) for ids in drawn]


def choose_streamed(_found: Any, plan: Any, *_: Any) -> Any:
    """Return the plan that reads the head."""
    return plan(HEAD_STREAMED)


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize(("family", "task", "form", "tied", "recompute", "group"), HEADS)
def test_losses_gradients_and_weights_are_those_of_the_resident_run(
    device: Device,
    tiny: Tiny,
    family: str,
    task: str,
    form: str,
    tied: bool,
    recompute: bool,
    group: str,
) -> None:
    dtype, stored = FORMATS[form]
    folder = tiny.model(family, dtype=dtype, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    settings: dict[str, Any] = TASKS[task] | stored
    settings |= {"training__gradient_checkpointing": recompute}
    settings |= {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    batch = draw_batch(5)
    batch = taught(batch, rest=False) if task == "distillation" else batch
    whole = train(*tiny.wgpu(device, folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.wgpu(device, folder, **settings, model__resident=0)
    replica.group_tokens = GROUPS[group]
    assert train(replica, weights, batch) == whole
    assert len(uploads_of(replica)._order) == LAYERS + CHUNKS
    assert replica.residents == describe_residents(HEAD_STREAMED, LAYERS)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("form", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_does_not_stay_has_the_memory_of_two_chunks(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, form: str, tied: bool
) -> None:
    dtype, stored = FORMATS[form]
    folder = tiny.model(dtype=dtype, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    settings: dict[str, Any] = {"task": "causal-lm", **stored, "model__resident": 0}
    gc.collect()
    taken: list[int] = []
    for reads in (False, True):
        if reads:
            monkeypatch.setattr(residence, "stream_head", choose_streamed)
        before = device.allocated
        replica, _ = tiny.wgpu(device, folder, **settings)
        taken.append(device.allocated - before)
        assert replica.residents.endswith("with the head") == reads
    element = 2 if form == "bf16" else 4
    assert taken[0] - taken[1] == element * WIDTH * (VOCABULARY - 2 * ROWS)


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize("group", ["all", "one"])
def test_a_chunk_is_uploaded_once_a_direction_and_chunk_of_targets(
    device: Device, tiny: Tiny, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each turn the two chunks that are needed first are still there."""
    folder = tiny.model(num_hidden_layers=LAYERS)
    replica, _ = tiny.wgpu(
        device, folder, task="causal-lm", model__resident=0, training__micro_batch_size=2
    )
    replica.group_tokens = GROUPS[group]
    uploads, batch = uploads_of(replica), draw_batch(6)
    _, micros, _ = replica._prepare_groups(batch, None, training=True)
    chunks = sum(micro.chunks for micro in micros)
    assert chunks > len(micros), "some have several chunks of targets"
    gradient(replica, batch)
    written = record_reads(monkeypatch, uploads.feed)
    before = uploads.feed.reads
    gradient(replica, batch)
    head = [number - LAYERS for number in written if number >= LAYERS]
    assert head == [*range(2, CHUNKS), *reversed(range(CHUNKS - 2))] * chunks
    passes = {"all": 1, "one": 3}[group]
    assert len(written) - len(head) == 2 * (LAYERS - 2) * passes
    assert uploads.feed.reads - before == len(written)


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_full_model_that_is_used_reads_its_head(
    device: Device, tiny: Tiny, form: str, tied: bool
) -> None:
    folder = tiny.model(dtype=FORMATS[form][0], num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    config = tiny.config(folder, task="causal-lm", method="full", data__max_seq_len=48)
    layout, batch = build_layout(folder, config), tiny.batch(4, "causal-lm")
    prompts = [[5, 6, 7], [8], list(range(40))]
    found: list[Any] = []
    for resident in ("all", 0):
        used = Compute(resident=resident).apply_storage(config)
        model = load_generator(folder, used, layout, None, device, longest=40, max_new_tokens=6)
        answers = model.generate(prompts, max_new_tokens=6, sampling=Sampling())
        replica = WgpuReplica(folder, used, layout, device, evaluates=True)
        found.append((answers, replica.evaluate(batch)))
    assert found[0] == found[1]
    assert len(uploads_of(replica)._order) == LAYERS + CHUNKS


@pytest.mark.usefixtures("reads_head")
def test_answers_between_steps_are_those_of_the_resident_model(device: Device, tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    found: list[Any] = []
    for resident in ("all", 0):
        replica, _ = tiny.wgpu(device, folder, task="causal-lm", model__resident=resident)
        batch = tiny.batch(2, "causal-lm")
        before = gradient(replica, batch)[0].tobytes()
        answers = replica.answer([[5, 6, 7], [8]], 6, frozenset())
        found.append((before, answers, gradient(replica, batch)[0].tobytes()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_that_is_cut_under_a_head_ends_the_step_with_one_line(
    device: Device, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied), folder)
    replica, _ = tiny.wgpu(device, folder, task="causal-lm", model__resident=0)
    batch, path = tiny.batch(2, "causal-lm"), folder / "model.safetensors"
    gradient(replica, batch)
    uploads = uploads_of(replica)
    write = uploads.write_layer

    def cut_before_the_head(segment: str) -> None:
        if segment == "head.0.forward.4":
            os.truncate(path, 4096)
        write(segment)

    monkeypatch.setattr(uploads, "write_layer", cut_before_the_head)
    expected = rf"^{re.escape(str(path))}: lm_head\.weight .*trunc"
    with pytest.raises(InputError, match=expected) as caught:
        gradient(replica, batch)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("settings", "reads"),
    [({"task": "causal-lm"}, True), ({"task": "classify"}, False)],
)
@pytest.mark.parametrize("asked", ["auto", 0])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_read_where_no_layer_stays_and_it_does_not_fit(
    device: Device,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    reads: bool,
    asked: Any,
    tied: bool,
) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    settings = settings | {"data__max_seq_len": 64, "training__batch_size": 1}
    settings |= {"training__micro_batch_size": 1, "training__gradient_checkpointing": True}
    config = tiny.config(folder, **settings)
    layout, batch = build_layout(folder, config), tiny.batch(2, settings["task"])
    kept, least = (
        plan_memory(folder, config, layout, 1, recompute=True, resident=resident).total
        for resident in (0, HEAD_STREAMED)
    )
    assert (least < kept) == reads
    found: list[np.ndarray] = []
    for free, resident in ((kept, 0), (kept - 1, HEAD_STREAMED), (least, HEAD_STREAMED)):
        if resident == HEAD_STREAMED and not reads:
            continue
        memory = math.ceil(free / USABLE)
        monkeypatch.setattr(planning, "measure_available_memory", lambda _, free=memory: free)
        replica, _ = tiny.wgpu(device, folder, **settings, model__resident=asked)
        assert replica.residents == describe_residents(resident, LAYERS)
        found.append(gradient(replica, batch)[0])
    assert all(np.array_equal(found[0], each) for each in found)
    monkeypatch.setattr(planning, "measure_available_memory", lambda _: least - 4)
    with pytest.raises(InputError, match=r"are free; use a smaller data\.max_seq_len$"):
        tiny.wgpu(device, folder, **settings, model__resident=asked)
