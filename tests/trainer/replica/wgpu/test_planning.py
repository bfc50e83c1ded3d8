"""Memory counted before start: exact for what is loaded, and for models that never lie here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica import driving
from tests.trainer.replica.driving import gradient
from tests.trainer.small_model import write_hollow_weights
from trainer.errors import InputError
from trainer.model.layout import build_layout
from trainer.replica.wgpu import planning
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.planning import count, plan
from trainer.replica.wgpu.replica import WgpuReplica

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.replica.conftest import MakeBatch

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
def test_qwen3_4b_in_nf4_fits_8_gb(tmp_path: Path, make_config: MakeConfig, task: str) -> None:
    folder = write_hollow(tmp_path, QWEN3_4B)
    config = make_config(
        folder,
        task=task,
        model__quantization="nf4",
        model__dtype="bfloat16",
        lora__target_modules=["q_proj", "v_proj"],
        data__max_seq_len=512,
    )
    layout = build_layout(folder, config)
    kept, computed_twice = (
        count(folder, config, layout, 1, recompute=again) for again in (False, True)
    )
    print(f"{task}: {kept}; with gradient checkpointing {computed_twice}")
    assert kept.total < 8e9
    assert computed_twice.total < 4.5e9
    linears = 36 * (2 * 4096 * 2560 + 2 * 1024 * 2560 + 3 * 9728 * 2560)
    embedding = 151_936 * 2560
    assert kept.parts["frozen"] == pytest.approx(0.5625 * linears + 2 * embedding, rel=1e-3)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_is_planned_is_what_is_taken(
    device: Device,
    tiny_model: TinyModel,
    make_config: MakeConfig,
    make_batch: MakeBatch,
    method: str,
) -> None:
    """But for results, uploads and parameters, which are a few pages."""
    folder = tiny_model()
    config = make_config(folder, method=method, data__max_seq_len=48)
    layout = build_layout(folder, config)
    planned = count(folder, config, layout, 2, recompute=False).total
    weights = driving.drawn_weights(folder, config)
    before = device.allocated
    replica = WgpuReplica(folder, config, layout, device)
    replica.write_trainable(weights)
    staging = sum(4 * replica._loaded.slots.padded_size(block.index) for block in layout.blocks)
    longest = [sample for sample in make_batch(200) if len(sample.input_ids) > 32][:2]
    gradient(replica, longest)
    taken = device.allocated - before - staging
    assert planned <= taken < planned + 300_000


def test_a_model_that_does_not_fit_is_refused(
    device: Device, tiny_model: TinyModel, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    monkeypatch.setattr(planning, "available", lambda _adapter: 300_000)
    with pytest.raises(InputError, match=r"the run needs .* are free; use method lora"):
        plan(folder, config, layout, device)


def test_activations_are_computed_twice_where_they_would_not_fit(
    device: Device, tiny_model: TinyModel, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(num_hidden_layers=8)
    config = make_config(folder, data__max_seq_len=256, training__micro_batch_size="auto")
    layout = build_layout(folder, config)
    kept, again = (count(folder, config, layout, 1, recompute=flag).total for flag in (False, True))
    monkeypatch.setattr(planning, "available", lambda _adapter: (kept + again) // 2)
    planned = plan(folder, config, layout, device)
    assert planned.recompute
    assert planned.limit.tokens == 256
    monkeypatch.setattr(planning, "available", lambda _adapter: 3 * kept)
    planned = plan(folder, config, layout, device)
    assert not planned.recompute
    assert planned.limit.tokens >= 512
