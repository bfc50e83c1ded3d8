"""Layers that are written to a device at each use: the bits of a resident run, and the memory."""

from __future__ import annotations

import copy
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
from trainer.config.lora import LINEARS
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.planning.resident_layers import describe_residents
from trainer.planning.vulkan import USABLE
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.replica.weights.layer_feed import LayerFeed
from trainer.replica.wgpu import planning
from trainer.replica.wgpu.generation.generator import load_generator
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.planning import plan_memory
from trainer.replica.wgpu.replica import WgpuReplica
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

LAYERS = 5
CASES = [
    *(("qwen3", task, "fp32", 0) for task in TASKS if task not in ("dpo", "packed")),
    *(("qwen2", "causal-lm", form, 1) for form in FORMATS if "products" not in form),
    ("qwen3", "distillation", "bf16", 2),
    ("llama", "freeze-a", "nf4", 0),
    ("llama", "classify", "nf4 of bf16", 3),
]
GROUPS = {"all": 1 << 20, "two": 2 * 2 * 48, "one": 0}
"""Most tokens of a group; a micro-batch has at most two rows of 48 tokens."""
WAYS = covering(
    (*case, recompute, group) for case in CASES for recompute in (True, False) for group in GROUPS
)


def uploads_of(replica: WgpuReplica) -> LayerUploads:
    uploads = replica._loaded.uploads
    assert uploads is not None
    return uploads


def record_reads(monkeypatch: pytest.MonkeyPatch, feed: LayerFeed) -> list[int]:
    """Return a list to which each layer is added when it is held."""
    held: list[int] = []
    hold = feed.hold

    def hold_and_record(layer: int, following: int | None) -> int:
        held.append(layer)
        return hold(layer, following)

    monkeypatch.setattr(feed, "hold", hold_and_record)
    return held


@pytest.mark.parametrize(("family", "task", "form", "resident", "recompute", "group"), WAYS)
def test_losses_gradients_and_weights_are_those_of_the_resident_run(
    device: Device,
    tiny: Tiny,
    family: str,
    task: str,
    form: str,
    resident: int,
    recompute: bool,
    group: str,
) -> None:
    """The resident run has three micro-batches, one after the other."""
    dtype, stored = FORMATS[form]
    folder = tiny.model(family, dtype=dtype, num_hidden_layers=LAYERS)
    settings: dict[str, Any] = TASKS[task] | stored
    settings |= {"training__gradient_checkpointing": recompute}
    settings |= {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    batch = tiny.batch(5, settings.get("task", "classify"))
    batch = taught(batch, rest=False) if task == "distillation" else batch
    whole = train(*tiny.wgpu(device, folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.wgpu(device, folder, **settings, model__resident=resident)
    replica.group_tokens = GROUPS[group]
    assert train(replica, weights, batch) == whole
    assert len(uploads_of(replica)._order) == LAYERS - resident


@pytest.mark.parametrize("form", ["fp32", "bf16", "nf4"])
def test_layers_that_do_not_stay_have_the_memory_of_two(
    device: Device, tiny: Tiny, form: str
) -> None:
    dtype, stored = FORMATS[form]
    folder = tiny.model(dtype=dtype, num_hidden_layers=LAYERS)
    taken: dict[int | str, int] = {}
    gc.collect()
    for resident in (0, 3, "all"):
        before = device.allocated
        replica, _ = tiny.wgpu(device, folder, task="causal-lm", **stored, model__resident=resident)
        taken[resident] = device.allocated - before
    frozen = replica._loaded.decoder.layers[0]
    arrays = [getattr(frozen, linear.removesuffix("_proj")).weight for linear in LINEARS]
    arrays += [each.scales for each in arrays if each.scales]
    layer = sum(each.buffer.size for each in arrays)
    assert taken["all"] - taken[0] == (LAYERS - 2) * layer
    assert taken[3] == taken["all"], "two layers have the memory of two"


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("use", ["answers", "classes", "losses"])
def test_a_full_model_that_is_used_has_the_memory_of_two_layers(
    device: Device, tiny: Tiny, form: str, use: str
) -> None:
    dtype = FORMATS[form][0]
    folder = tiny.model(dtype=dtype, num_hidden_layers=LAYERS)
    task = "classify" if use == "classes" else "causal-lm"
    config = tiny.config(folder, task=task, method="full", data__max_seq_len=48)
    layout, batch = build_layout(folder, config), tiny.batch(4, task)
    found: list[Any] = []
    taken: list[int] = []
    for resident in ("all", 0):
        used = Compute(resident=resident).apply_storage(config)
        model: Any = None
        gc.collect()
        before = device.allocated
        if use == "answers":
            model = load_generator(folder, used, layout, None, device, longest=3, max_new_tokens=6)
            taken.append(device.allocated - before)
            prompts = [[5, 6, 7], [8]]
            found.append(model.generate(prompts, max_new_tokens=6, sampling=Sampling()))
        else:
            model = WgpuReplica(folder, used, layout, device, evaluates=True)
            taken.append(device.allocated - before)
            found.append(model.evaluate(batch))
    assert found[0] == found[1]
    layer = sum(
        math.prod(header.shape)
        for name, header in read_headers(folder).items()
        if name.startswith("model.layers.0.") and len(header.shape) == 2
    )
    table = 300 * 64 if task == "classify" else 0  # rows of a micro-batch instead
    size = 2 if form == "bf16" else 4
    assert taken[0] - taken[1] == size * ((LAYERS - 2) * layer + table)


@pytest.mark.parametrize("group", ["all", "one"])
def test_a_group_uploads_a_layer_once_in_each_direction(
    device: Device, tiny: Tiny, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    replica, _ = tiny.wgpu(
        device, folder, task="causal-lm", model__resident=0, training__micro_batch_size=2
    )
    replica.group_tokens = GROUPS[group]
    uploads, batch = uploads_of(replica), tiny.batch(6, "causal-lm")
    written = record_reads(monkeypatch, uploads.feed)
    gradient(replica, batch[:2])
    # At each turn both slots still have the layers that are needed first; one more is on its way.
    forward, backward = [*range(LAYERS)], [*reversed(range(LAYERS - 2))]
    assert written == forward + backward
    assert uploads.feed.reads == len(written) + 1
    written.clear()
    gradient(replica, batch)
    passes = {"all": 1, "one": 3}[group]
    assert written == (forward[2:] + backward) * passes
    assert uploads.feed.reads == 2 * LAYERS - 1 + len(written)


def test_gradients_leave_at_the_turn_of_their_layer(device: Device, tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    replica, _ = tiny.wgpu(
        device, folder, task="causal-lm", model__resident=0, training__micro_batch_size=2
    )
    left: list[int] = []
    feed, batch = uploads_of(replica).feed, tiny.batch(6, "causal-lm")
    gradient(replica, batch)
    started = feed.reads
    replica.forward_backward(batch, lambda index, _: left.append(feed.reads - started))
    reads = feed.reads - started
    # The last two leave after all reads, and one layer is read ahead.
    assert left[0] < left[1] < left[2] <= reads
    assert left[-2:] == [reads, reads]


def test_memory_of_a_group_is_that_of_the_plan(device: Device, tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {"task": "causal-lm", "data__max_seq_len": 48}
    settings |= {"training__micro_batch_size": 1, "training__gradient_checkpointing": True}
    longest = next(each for each in tiny.batch(50, "causal-lm") if len(each.input_ids) > 32)
    layout = build_layout(folder, config := tiny.config(folder, **settings, model__resident=0))
    for count in (1, 3):
        replica, _ = tiny.wgpu(device, folder, **settings, model__resident=0)
        gradient(replica, [longest] * count)
        waiting = 48 * (count - 1)
        planned = plan_memory(folder, config, layout, 1, recompute=True, waiting=waiting)
        memory = replica._engine._waiting
        assert memory is not None
        assert memory.pool.report_budget().parts["waiting"] == planned.parts["waiting"]


def test_answers_are_those_of_the_resident_model(device: Device, tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    settings: dict[str, Any] = {"task": "causal-lm", "model__quantization": "nf4"}
    found: list[Any] = []
    for resident in ("all", 1):
        replica, _ = tiny.wgpu(device, folder, **settings, model__resident=resident)
        batch = tiny.batch(2, "causal-lm")
        answers = replica.answer([[5, 6, 7], [8]], 6, frozenset())
        found.append((answers, gradient(replica, batch)[0].tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("tied", "task", "form", "reads"),
    [
        (True, "causal-lm", "fp32", False),
        (True, "classify", "fp32", True),
        (False, "causal-lm", "bf16", True),
        (False, "causal-lm", "bf16 file as fp32", True),
    ],
)
def test_of_an_embedding_the_rows_of_a_micro_batch_are_on_the_device(
    device: Device, tiny: Tiny, tied: bool, task: str, form: str, reads: bool
) -> None:
    dtype, stored = FORMATS[form]
    folder = tiny.model(dtype=dtype, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    settings: dict[str, Any] = {"task": task, "training__micro_batch_size": 2, **stored}
    gc.collect()  # what was recorded before has buffers of the device
    started = device.allocated
    whole, before = tiny.wgpu(device, folder, **settings, model__resident="all"), device.allocated
    some = tiny.wgpu(device, folder, **settings, model__resident=LAYERS - 2)
    saved = before - started - (device.allocated - before)
    batch = tiny.batch(5, task)
    assert train(*some, batch) == train(*whole, batch)
    table = (2 if form == "bf16" else 4) * 300 * 64
    assert saved == (table if reads else 0), "two layers have the memory of two"


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_that_is_cut_ends_the_step_with_one_line(
    device: Device, tiny: Tiny, tmp_path: Path, tied: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied), folder)
    replica, _ = tiny.wgpu(device, folder, task="causal-lm", model__resident=1)
    batch = tiny.batch(2, "causal-lm")
    gradient(replica, batch)
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    part = r"layer \d" if tied else r"model\.embed_tokens\.weight"
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: {part} .*trunc") as caught:
        gradient(replica, batch)
    assert "\n" not in str(caught.value)


def test_the_host_is_two_layers_ahead_of_the_device_at_most(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads wait in the host's memory until the device has copied them."""
    folder = tiny.model(num_hidden_layers=LAYERS)
    replica, _ = tiny.wgpu(device, folder, task="causal-lm", model__resident=0)
    marked = waited = ahead = 0
    mark = device.mark_submitted

    def count_marks() -> Any:
        nonlocal marked
        wait, number = mark(), marked
        marked += 1

        def count_waits() -> None:
            nonlocal waited
            wait()
            waited = number + 1

        return count_waits

    own = copy.copy(device)  # readbacks of gradients are marked, too
    monkeypatch.setattr(own, "mark_submitted", count_marks)
    monkeypatch.setattr(uploads_of(replica), "_device", own)
    write = device.handle.queue.write_buffer

    def count_ahead(*given: Any) -> None:
        nonlocal ahead
        ahead = max(ahead, marked - waited)
        write(*given)

    monkeypatch.setattr(device.handle.queue, "write_buffer", count_ahead)
    gradient(replica, tiny.batch(2, "causal-lm"))
    assert marked == LAYERS + LAYERS - 2
    assert ahead == 1


def test_memory_decides_how_many_layers_stay(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {"task": "causal-lm", "data__max_seq_len": 64}
    settings |= {"training__micro_batch_size": 1, "training__batch_size": 1}
    batch = tiny.batch(2, "causal-lm")
    found = gradient(tiny.wgpu(device, folder, **settings)[0], batch)[0]
    layout = build_layout(folder, config := tiny.config(folder, **settings))
    for resident in (None, 2, 1, 0):
        needed = plan_memory(folder, config, layout, 1, recompute=True, resident=resident).total
        free = math.ceil(needed / USABLE)
        monkeypatch.setattr(planning, "measure_available_memory", lambda _, free=free: free)
        if (
            resident == 2
        ):  # three samples wait in the memory of two layers, so that a step reads less
            grouped = tiny.wgpu(device, folder, **settings | {"training__batch_size": 4})[0]
            assert grouped.residents == describe_residents(0, LAYERS)
            assert grouped.group_tokens == 4 * 64
            assert np.array_equal(gradient(grouped, batch)[0], found)
        replica, _ = tiny.wgpu(device, folder, **settings)
        stays = "" if resident is None else describe_residents(resident, LAYERS)
        assert replica.residents == stays
        assert np.array_equal(gradient(replica, batch)[0], found)
    monkeypatch.setattr(planning, "measure_available_memory", lambda _: free - 2)
    with pytest.raises(InputError, match=r"are free; use a smaller data\.max_seq_len$"):
        tiny.wgpu(device, folder, **settings)
