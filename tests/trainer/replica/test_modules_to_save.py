"""`lora.modules_to_save`: the head and the embedding train whole beside adapters, as in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.real.peft_loop import Encoded, PeftLoop
from tests.trainer.replica.driving import gradient, start
from tests.trainer.tiny_run import tiny_progress
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.trained_model import load_trained, starting_weights
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.replica.torch.replica import TorchReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on tied embeddings

NAMES = [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]]
LORA: dict[str, Any] = {"task": "causal-lm", "num_classes": None, "lora__lora_rank": 4}
STEPS = 3


def rows_of(batch: list[Any]) -> list[Encoded]:
    """Return samples as transformers takes them: `[1, T]` each."""
    return [
        Encoded(*(torch.tensor(each)[None].long() for each in (sample.input_ids, sample.labels)))
        for sample in batch
    ]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_losses_are_those_of_peft(
    tiny: Tiny, model_type: str, names: list[str], tied: bool
) -> None:
    """A model that Motley computes, and one that transformers does, whose embedding has a scale."""
    folder = tiny.model(model_type, tie_word_embeddings=tied)
    settings = {"optimizer__learning_rate": 1e-2, "optimizer__weight_decay": 0.1}
    config = tiny.config(folder, **LORA, **settings, lora__modules_to_save=names)
    layout = build_layout(folder, config)
    assert [block.name for block in layout.blocks if not block.is_layer] == [
        name
        for name, module in (("head", "lm_head"), ("embedding", "embed_tokens"))
        if module in names
    ]
    batch = tiny.batch(5, "causal-lm")
    loop = PeftLoop(folder, config)
    for module in loop.model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # Gemma's token 0 is in these texts, and is trained here
    expected = loop.losses(rows_of(batch), STEPS)

    replica = TorchReplica(folder, config, layout, threads=1)
    optimizer = AdamW(config.optimizer, layout)
    state = TrainState.create(initial_weights(layout, folder, config))
    found: list[float] = []
    for step in range(STEPS):
        replica.write_trainable(state.weights)
        summed, result, _ = gradient(replica, batch)
        found.append(result.loss_sum / result.weight)
        mean = (summed / np.float32(result.weight)).astype(np.float32)
        clip = optimizer.clip_scale(float(np.linalg.norm(mean)))
        optimizer.apply(state, mean, loop._rate(step, STEPS), clip)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_peft_opens_what_is_saved(tiny: Tiny, names: list[str], tied: bool, tmp_path: Path) -> None:
    """So does what reads adapters here, and a run that goes on from them."""
    import peft
    import transformers

    folder = tiny.model(tie_word_embeddings=tied)
    config = tiny.config(folder, **LORA, lora__modules_to_save=names)
    layout = build_layout(folder, config)
    replica, weights = start(folder, config)
    generator = np.random.default_rng(0)
    weights += generator.normal(0, 0.05, weights.shape).astype(np.float32)
    replica.write_trainable(weights)
    store = CheckpointStore(tmp_path / "checkpoints", layout, config, folder)
    path = store.save(TrainState.create(weights.copy()).take_snapshot(), tiny_progress(0))

    batch = tiny.batch(1, "causal-lm")
    ids = torch.from_numpy(batch[0].input_ids.astype(np.int64))[None]
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(base, path).eval()
    with torch.no_grad():
        theirs = opened(input_ids=ids).logits
        hidden = replica._model.model(input_ids=ids).last_hidden_state
        mine = replica._model.lm_head(hidden)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)

    trained = load_trained(path)
    merged = TorchReplica(trained.base_dir, trained.config, trained.layout, threads=1)
    expected = replica.evaluate(batch).loss_sum
    assert merged.evaluate(batch).loss_sum == pytest.approx(expected, rel=1e-5)

    onward = config.with_settings({"model.adapter": str(path)})
    assert np.array_equal(starting_weights(layout, folder, onward), weights)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_before_the_first_step_it_is_the_base(
    tiny: Tiny, model_type: str, quantization: str
) -> None:
    """Also in bfloat16, in whose format hidden states stay, and when prompts are answered."""
    folder = tiny.model(model_type)
    base = {"model__dtype": "bfloat16", "model__quantization": quantization}
    batch = tiny.batch(4, "causal-lm")
    plain, _ = tiny.start(folder, **LORA, **base)
    whole, _ = tiny.start(folder, **LORA, **base, lora__modules_to_save=NAMES[-1])
    assert whole.evaluate(batch).loss_sum == plain.evaluate(batch).loss_sum
    prompts = [sample.input_ids.tolist() for sample in batch]
    assert whole.answer(prompts, 3, frozenset()) == plain.answer(prompts, 3, frozenset())


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "qwen3",
            {"lora__modules_to_save": ["head"]},
            "no module head .*has lm_head, embed_tokens",
        ),
        ("gpt2", {"lora__modules_to_save": ["embed_tokens"]}, r"\(it has lm_head, wte\)"),
        (
            "qwen3",
            {"lora__modules_to_save": ["lm_head"], "task": "classify", "num_classes": 5},
            r"no module lm_head to train whole \(it has embed_tokens\)",
        ),
    ],
)
def test_what_the_model_lacks_is_refused(
    tiny: Tiny, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    folder = tiny.model(model_type)
    with pytest.raises(InputError, match=f"lora.modules_to_save: .*{reason}"):
        build_layout(folder, tiny.config(folder, **LORA | settings))
