"""Memory counted before start: exact for what is loaded, and for models that never lie here."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica import driving
from tests.trainer.replica.driving import gradient
from tests.trainer.small_model import write_hollow_weights
from trainer.model.architecture import read_architecture
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_config
from trainer.planning import stored_layers
from trainer.planning.device_models import DeviceModel
from trainer.planning.devices import PCIE, ClusterShape, HostPool
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED, resolve_resident
from trainer.planning.strategies import Request, plan_option
from trainer.planning.strategy import Strategy
from trainer.planning.vulkan import USABLE
from trainer.planning.vulkan_buffers import PLANNED_ENTRIES, count_slots, padded_length
from trainer.planning.workers import RunMemory
from trainer.replica.wgpu import planning
from trainer.replica.wgpu.batch import Bucket
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool, Purpose
from trainer.replica.wgpu.layer_major import WaitingMemory
from trainer.replica.wgpu.layers.decoder import Decoder, Tensors
from trainer.replica.wgpu.layers.head import LossSums
from trainer.replica.wgpu.loaded_model import freeze_weights, plan_decoder
from trainer.replica.wgpu.planning import plan_memory, plan_replica
from trainer.replica.wgpu.recordings import Recording, RecordingSettings, make_recording
from trainer.replica.wgpu.replica import WgpuReplica
from trainer.replica.wgpu.weights.loader import take_frozen
from trainer.replica.wgpu.weights.slots import Slots
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny
    from trainer.config.run import RunConfig
    from trainer.planning.strategy import Method

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


def write_hollow(folder: Path, tree: dict[str, Any]) -> Path:
    """Write a model directory of which headers are all that is read."""
    (folder / "config.json").write_text(json.dumps(tree))
    return write_hollow_weights(folder)


@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_qwen3_4b_in_nf4_fits_8_gb(tmp_path: Path, tiny: Tiny, task: str) -> None:
    folder = write_hollow(tmp_path, QWEN3_4B)
    config = tiny.config(
        folder,
        task=task,
        model__quantization="nf4",
        model__dtype="bfloat16",
        lora__target_modules=["q_proj", "v_proj"],
        data__max_seq_len=512,
    )
    layout = build_layout(folder, config)
    kept, computed_twice = (
        plan_memory(folder, config, layout, 1, recompute=again) for again in (False, True)
    )
    print(f"{task}: {kept}; with gradient checkpointing {computed_twice}")
    assert kept.total < 8e9
    assert computed_twice.total < 4.5e9
    linears = 36 * (2 * 4096 * 2560 + 2 * 1024 * 2560 + 3 * 9728 * 2560)
    embedding = 151_936 * 2560
    assert kept.parts["frozen"] == pytest.approx(0.5625 * linears + 2 * embedding, rel=1e-3)


def load_planned(
    folder: Path, config: RunConfig, pool: MemoryPool, resident: int | None = None
) -> Decoder:
    """Return a model that trains, on memory of a pool without a device."""
    architecture, slots = read_architecture(folder), Slots(build_layout(folder, config))
    tables = count_slots(config.data.max_seq_len, 0), architecture.head_dim // 2
    tensors = Tensors(
        take_frozen(architecture, config, pool, resident),
        slots.tensors_by_name(slots.take_arrays(pool, "trainable")),
        slots.tensors_by_name(slots.take_arrays(pool, "gradients")),
        (pool.take(tables, purpose="frozen"), pool.take(tables, purpose="frozen")),
    )
    return Decoder(architecture, read_config(folder), config, tensors)


def record(
    decoder: Decoder,
    pool: MemoryPool,
    config: RunConfig,
    samples: int,
    *,
    recompute: bool,
    evaluates: bool,
    waits: bool = False,
) -> Recording:
    """Record a micro-batch of the longest samples."""
    sums = LossSums(Array(None, (1,)), Array(None, (1,)), Array(None, (1,), "u32"))
    entries = PLANNED_ENTRIES if config.distillation and not evaluates else 0
    length = padded_length(config.data.max_seq_len)
    bucket = Bucket(samples, length, config.task == "classify", entries)
    settings = RecordingSettings(bucket, training=not evaluates, keep=not recompute, waits=waits)
    return make_recording(decoder, pool, sums, settings)


def recorded(
    folder: Path,
    config: RunConfig,
    samples: int,
    *,
    recompute: bool,
    evaluates: bool,
    resident: int | None,
) -> dict[Purpose, int]:
    """Return what the engine takes to record a micro-batch, without a device."""
    pool = MemoryPool(None)
    if evaluates:
        decoder = plan_decoder(folder, config, build_layout(folder, config), pool, resident)
    else:
        decoder = load_planned(folder, config, pool, resident)
    layers = decoder.architecture.num_layers
    waits = resolve_resident(config.model.resident, layers, resident) is not None
    ways = {"recompute": recompute, "evaluates": evaluates, "waits": waits}
    recording = record(decoder, pool, config, samples, **ways)
    parts = pool.report_budget().parts
    if waits:
        memory = WaitingMemory(MemoryPool(None))
        memory.reserve_rows(2 * recording.rows, recording)
        parts |= memory.pool.report_budget().parts
    return parts


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "full"},
        {"method": "full", "task": "causal-lm"},
        {"method": "lora", "task": "causal-lm", "lora__target_modules": ["q_proj", "down_proj"]},
        {"method": "lora", "model__quantization": "nf4", "model__dtype": "bfloat16"},
        {"method": "lora", "lora__freeze_a": True},
        {"method": "lora", "model__resident": 0},
        {"method": "lora", "model__resident": 1, "task": "causal-lm"},
        {"method": "lora", "model__resident": 0, "model__quantization": "nf4"},
        {"method": "lora", "lora__freeze_a": True, "lora__layers_to_transform": [1]},
        {"task": "causal-lm", "distillation__alpha": 0.5, "data__max_seq_len": 1000},
    ],
)
def test_the_plan_is_the_recording_to_the_byte(
    tmp_path: Path, tiny: Tiny, model_type: str, settings: dict[str, Any]
) -> None:
    tree = {**QWEN3_4B, "model_type": model_type, "hidden_size": 256, "intermediate_size": 704}
    tree |= {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    tree |= {"head_dim": 64, "vocab_size": 70_000, "attention_bias": True}
    check_plan(write_hollow(tmp_path, tree), tiny, settings)


@pytest.mark.parametrize("chunk", [1 << 17, 16_000, 40_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_of_a_head_that_is_read_is_its_recording_to_the_byte(
    tmp_path: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    dtype: str,
    tied: bool,
) -> None:
    """One chunk, several, and two of which the last is smaller."""
    tree = {**QWEN3_4B, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
    folder = write_hollow(tmp_path, tree | {"vocab_size": 70_000, "tie_word_embeddings": tied})
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", 256 * chunk)
    check_plan(folder, tiny, {"task": "causal-lm", "model__dtype": dtype}, HEAD_STREAMED)


def check_plan(
    folder: Path, tiny: Tiny, settings: dict[str, Any], resident: int | None = None
) -> None:
    """Compare the plan of each part with what a recording takes."""
    config = tiny.config(folder, **settings)
    for samples, recompute, evaluates in ((1, False, False), (3, True, False), (3, False, True)):
        ways: dict[str, Any] = {"recompute": recompute, "evaluates": evaluates}
        ways["resident"] = resident
        used, layout = config, build_layout(folder, config)
        if evaluates:
            used, layout = freeze_weights(folder, config, layout)
        waiting = samples * padded_length(config.data.max_seq_len)
        planned = plan_memory(folder, used, layout, samples, **ways, waiting=waiting)
        taken = Counter(recorded(folder, config, samples, **ways))
        assert +Counter(planned.parts) == +taken, ways


@pytest.mark.parametrize("recompute", [False, True])
def test_a_validation_fits_the_memory_of_training(
    tmp_path: Path, tiny: Tiny, recompute: bool
) -> None:
    folder = write_hollow(tmp_path, QWEN3_4B)
    config = tiny.config(folder, task="causal-lm", model__quantization="nf4")
    pool = MemoryPool(None)
    decoder = load_planned(folder, config, pool)
    taken: list[int] = []
    for evaluates in (False, True):
        record(decoder, pool, config, 2, recompute=recompute, evaluates=evaluates)
        taken.append(pool.report_budget().total)
    assert taken[0] == taken[1]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_is_planned_is_what_is_taken(device: Device, tiny: Tiny, method: str) -> None:
    """But for results, uploads and parameters, which are a few pages."""
    folder = tiny.model()
    config = tiny.config(folder, method=method, data__max_seq_len=48)
    layout = build_layout(folder, config)
    planned = plan_memory(folder, config, layout, 2, recompute=False).total
    weights = driving.drawn_weights(folder, config)
    before = device.allocated
    replica = WgpuReplica(folder, config, layout, device)
    replica.write_trainable(weights)
    staging = sum(4 * replica._loaded.slots.padded_size(block.index) for block in layout.blocks)
    longest = [sample for sample in tiny.batch(200) if len(sample.input_ids) > 32][:2]
    gradient(replica, longest)
    taken = device.allocated - before - staging
    assert planned <= taken < planned + 300_000


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_a_model_that_only_evaluates_has_no_gradients(
    device: Device, tiny: Tiny, task: str, method: str
) -> None:
    folder = tiny.model()
    config = tiny.config(folder, task=task, method=method, training__gradient_checkpointing=True)
    layout, weights = build_layout(folder, config), driving.drawn_weights(folder, config)
    if full := method == "full":
        weights = initial_weights(layout, folder, config)
    batch, taken, found = tiny.batch(4, task), [], []
    for evaluates in (False, True):
        before = device.allocated
        replica = WgpuReplica(folder, config, layout, device, evaluates=evaluates)
        taken.append(device.allocated - before)
        if not (full and evaluates):  # it has read them itself
            replica.write_trainable(weights)
        found.append(replica.evaluate(batch))
    assert found[0] == found[1]
    slots = Slots(layout)
    gradients = sum(4 * slots.padded_size(block.index) for block in layout.blocks)
    saved = taken[0] - taken[1]  # also what they are read back to
    assert 2 * gradients <= saved < 2.1 * gradients


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_plan_of_sizes_is_the_engine_s_and_doctor_s(
    device: Device,
    tmp_path: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    method: Method,
) -> None:
    """`launch plan` knows sizes alone, `launch doctor` a model's headers, the engine all."""
    tree = {**QWEN3_4B, "model_type": family, "num_hidden_layers": 8, "vocab_size": 4096}
    tree |= {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    folder = write_hollow(tmp_path, tree)
    nf4 = {"model__quantization": "nf4"} if method == "qlora" else {}
    settings = {"task": "causal-lm", "model__dtype": "bfloat16", "data__max_seq_len": 16, **nf4}
    config = tiny.config(folder, **settings, training__batch_size=8)
    layout, memory = build_layout(folder, config), RunMemory.of_model_folder(folder, config)
    chosen: list[int | None] = []
    for again, resident, waiting in (
        (False, None, 0),
        (True, None, 0),
        *((True, some, 7 * 16) for some in (5, 2, 0)),
        (True, 0, 0),
    ):
        planned = plan_memory(
            folder, config, layout, 1, recompute=again, resident=resident, waiting=waiting
        )
        free = math.ceil(planned.total / USABLE)
        monkeypatch.setattr(planning, "measure_available_memory", lambda _, free=free: free)
        engine = plan_replica(folder, config, layout, device)
        card = DeviceModel(name="Radeon", flops=1e12, memory=free, watts=None, source="AMD")
        pool = HostPool(hosts=1, devices=1, device=card, inside=PCIE)
        request = Request(
            shape=read_shape(folder),
            cluster=ClusterShape(groups=(pool,), between=None),
            method=method,
            rank=config.lora.lora_rank,
            length=config.data.max_seq_len,
        )
        option = plan_option(request, Strategy(), method)
        assert option.training.resident == engine.resident
        assert option.memory.total == engine.budget.total <= option.room
        assert (option.training.recompute == "full") == engine.recompute
        assert memory.plan_worker("wgpu", option.room).resident == engine.resident
        chosen.append(engine.resident)
    assert chosen == [None, None, 5, 2, 0, 0]


def test_a_model_that_does_not_fit_is_refused(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model()
    config = tiny.config(folder)
    layout = build_layout(folder, config)
    monkeypatch.setattr(planning, "measure_available_memory", lambda _adapter: 300_000)
    with pytest.raises(InputError, match=r"the run needs .* are free; use a smaller data\.max"):
        plan_replica(folder, config, layout, device)


def test_activations_are_computed_twice_where_they_would_not_fit(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model(num_hidden_layers=8)
    config = tiny.config(folder, data__max_seq_len=256, training__micro_batch_size="auto")
    layout = build_layout(folder, config)
    kept, again = (
        plan_memory(folder, config, layout, 1, recompute=flag).total for flag in (False, True)
    )
    monkeypatch.setattr(planning, "measure_available_memory", lambda _adapter: (kept + again) // 2)
    planned = plan_replica(folder, config, layout, device)
    assert planned.recompute
    assert planned.limit.tokens == 256
    monkeypatch.setattr(planning, "measure_available_memory", lambda _adapter: 3 * kept)
    planned = plan_replica(folder, config, layout, device)
    assert not planned.recompute
    assert planned.limit.tokens >= 512
