"""`lora.freeze_a`: A keeps its seeded start, B alone trains, and what is saved is a whole adapter.

FFA-LoRA, arXiv:2403.12313.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.real.peft_loop import Encoded, PeftLoop
from tests.trainer.replica.driving import drawn_weights, gradient, relative
from tests.trainer.tiny_run import tiny_progress
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.trained_model import load_trained
from trainer.model.hf_export import ADAPTER_FILE
from trainer.model.layout import SIDE_A, build_layout, frozen_adapters
from trainer.optimizer.adamw import TrainState
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

LORA: dict[str, Any] = {"task": "causal-lm", "lora__lora_rank": 4}


def loop_with_frozen_a(tiny: Tiny, folder: Path) -> PeftLoop:
    """Return PEFT's model, whose A are the seeded ones and do not train."""
    loop = PeftLoop(folder, tiny.config(folder, **LORA))
    for name, parameter in loop.model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return loop


def b_of(flat: np.ndarray, tiny: Tiny, folder: Path) -> np.ndarray:
    """Return a vector of both sides without those of A."""
    slots = build_layout(folder, tiny.config(folder, **LORA)).iter_tensors()
    return np.concatenate([flat[s.start : s.stop] for s in slots if not s.name.endswith(SIDE_A)])


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_the_gradient_is_that_of_b_in_peft(tiny: Tiny, model_type: str) -> None:
    folder = tiny.model(model_type)
    whole = tiny.config(folder, **LORA)
    both, _ = tiny.start(folder, **LORA)
    replica, weights = tiny.start(folder, **LORA, lora__freeze_a=True)
    batch = tiny.batch(5, "causal-lm")
    mine, result, _ = gradient(replica, batch)
    theirs, expected, _ = gradient(both, batch)
    assert result.loss_sum == expected.loss_sum
    assert relative(mine, b_of(theirs, tiny, folder)) < 1e-6
    if model_type == "gpt2":  # PEFT's names of it are others
        return
    loop, start = loop_with_frozen_a(tiny, folder), drawn_weights(folder, whole)
    loop.write(start)
    assert np.array_equal(b_of(start, tiny, folder), weights)
    rows = [Encoded(*_rows(sample)) for sample in batch]
    loss, targets = loop.backward(rows)
    assert (result.loss_sum, result.weight) == (pytest.approx(loss, rel=1e-6), targets)
    grads = {name: p.grad for name, p in loop.model.named_parameters() if p.grad is not None}
    assert not any("lora_A" in name for name in grads)
    for slot in replica.layout.iter_tensors():
        found = grads[slot.name.replace(".lora_B.", ".lora_B.default.")]
        assert relative(mine[slot.start : slot.stop], found.flatten().numpy()) < 1e-6, slot.name


def _rows(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels `[1, T]` as transformers takes them."""
    ids, labels = (torch.tensor(each)[None].long() for each in (sample.input_ids, sample.labels))
    return ids, labels


def test_half_is_exchanged_and_all_is_saved(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny.model()
    config = tiny.config(folder, **LORA, lora__freeze_a=True)
    assert config.agreement_digest() != tiny.config(folder, **LORA).agreement_digest()
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    store = CheckpointStore(tmp_path / "checkpoints", layout, config, folder)
    state = TrainState.create(weights.copy())
    state.step = 7
    path = store.save(state.take_snapshot(), tiny_progress(7))
    restored = store.restore()
    assert restored is not None
    assert restored.state.compute_digest() == state.compute_digest()

    saved = load_file(path / ADAPTER_FILE)
    whole = build_layout(folder, tiny.config(folder, **LORA))
    assert {name: array.shape for name, array in saved.items()} == {
        slot.name: slot.shape for slot in whole.iter_tensors()
    }
    assert whole.size == layout.size + sum(slot.size for slot in frozen_adapters(folder, config))
    trained = load_trained(path)
    assert trained.layout.digest == whole.digest
    assert trained.weights is not None
    assert np.array_equal(trained.weights, drawn_weights(folder, tiny.config(folder, **LORA)))


def test_peft_opens_what_is_saved_and_it_merges(tiny: Tiny, tmp_path: Path) -> None:
    import peft
    import transformers

    folder = tiny.model()
    replica, weights = tiny.start(folder, **LORA, lora__freeze_a=True)
    config = tiny.config(folder, **LORA, lora__freeze_a=True)
    store = CheckpointStore(tmp_path / "checkpoints", replica.layout, config, folder)
    path = store.save(TrainState.create(weights).take_snapshot(), tiny_progress(0))
    batch = tiny.batch(3, "causal-lm")
    expected = replica.evaluate(batch)

    def loss_of(model: Any) -> float:
        total = 0.0
        for ids, labels in map(_rows, batch):
            with torch.no_grad():
                loss = model.eval()(input_ids=ids, labels=labels).loss
            total += float(loss) * int((labels[:, 1:] != -100).sum())
        return total

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loss_of(peft.PeftModel.from_pretrained(base, path)) == pytest.approx(expected.loss_sum)
    merged = merge_adapter(open_adapter(path)[0], tmp_path / "merged")
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert loss_of(found) == pytest.approx(expected.loss_sum)


OF_WHOLE_MODELS: list[dict[str, Any]] = [
    {"lora__freeze_a": True},
    {"lora__layers_to_transform": [1]},
    {"task": "causal-lm", "training__sample_prompts": "prompts.jsonl"},
    {"model__adapter": "adapter"},
    {"lora__use_dora": True},
    {"lora__modules_to_save": ["embed_tokens"]},
    {"task": "classify", "training__class_weights": [1, 2, 3, 4, 5]},
    {"task": "classify", "training__label_smoothing": 0.1},
]


@pytest.mark.parametrize("chosen", OF_WHOLE_MODELS)
@pytest.mark.parametrize(
    "sharing", [{"parallel__tensor": 2}, {"parallel__data": "fsdp"}, {"exchange__topology": "ring"}]
)
def test_what_shares_a_model_refuses_it(
    tiny: Tiny, chosen: dict[str, Any], sharing: dict[str, Any]
) -> None:
    folder = tiny.model()
    with pytest.raises(InputError, match=r"\w+\.\w+ needs a whole model in each worker"):
        tiny.config(folder, **LORA | chosen, **sharing)


@pytest.mark.parametrize("chosen", OF_WHOLE_MODELS)
def test_ranks_refuse_it(tiny: Tiny, chosen: dict[str, Any]) -> None:
    from trainer.replica.torch.parallel.replica import ParallelReplica

    folder = tiny.model()
    config = tiny.config(folder, **LORA | chosen)
    mesh: Any = None  # it is refused before a mesh is looked at
    layout = build_layout(folder, config)
    with pytest.raises(InputError, match=r"\w+\.\w+: processes that share a model"):
        ParallelReplica(folder, config, layout, mesh, torch.device("cpu"))
