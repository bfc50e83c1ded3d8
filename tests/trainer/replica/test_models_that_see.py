"""The language model of one that also sees trains, in the forms in which such are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.published_forms import as_gemma_3, as_one_that_sees, changed
from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from tests.trainer.replica.test_families import theirs, write_trained
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge
from trainer.checkpoint.trained_model import load_trained
from trainer.data.encoder import IGNORED
from trainer.model.config_keys import notices
from trainer.model.families import left_to_transformers
from trainer.model.header_layout import PEFT_PREFIX
from trainer.model.layout import GradientLayout, build_layout
from trainer.model.tensor_names import language_name
from trainer.planning.model_config import read_shape

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def gemma_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Gemma 3 with its vision tower, as transformers saves it."""
    import transformers

    text: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 300,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=290,
        eoi_token_index=291,
        image_token_index=292,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.1)
    folder = tmp_path_factory.mktemp("gemma-3")
    model.save_pretrained(folder)
    return folder


def test_gemma_3_and_its_files_are_those_of_transformers_and_peft(
    tiny: Tiny, gemma_3: Path, tmp_path: Path
) -> None:
    """PEFT opens the adapter on the whole model; a merged one is the language model."""
    import transformers

    assert list(notices(gemma_3)) == [
        "multi_modal_projector, vision_tower of the weights: not used, the language model alone"
        " trains"
    ]
    config = tiny.config(gemma_3, task="causal-lm")
    layout, weights = build_layout(gemma_3, config), drawn_weights(gemma_3, config)
    adapter = write_trained(tmp_path / "out", gemma_3, config, layout, weights)
    model = theirs(adapter, gemma_3, config)
    assert type(model.base_model.model).__name__ == "Gemma3ForConditionalGeneration"
    batch, total = tiny.batch(6, "causal-lm"), torch.zeros(())
    for sample in batch:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        kinds = torch.zeros_like(ids)  # none is an image's
        logits = model(input_ids=ids, token_type_ids=kinds, use_cache=False).logits[0, :-1]
        assert isinstance(sample.labels, np.ndarray)
        wanted = torch.from_numpy(sample.labels[1:].astype(np.int64))
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    total.backward()
    grads = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    expected = np.concatenate([grads[slot.name].numpy().ravel() for slot in layout.tensors()])
    mine, found, _ = gradient(start(gemma_3, config)[0], batch)
    assert found.loss_sum == pytest.approx(total.item(), rel=1e-6)
    assert relative(mine, expected) < 1e-5
    trained = load_trained(adapter)
    assert trained.weights is not None
    assert np.array_equal(trained.weights, weights)

    folder = merge(open_adapter(adapter)[0], tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(merged).__name__ == "Gemma3ForCausalLM"
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        logits = (merged(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert relative(logits[0].numpy(), logits[1].numpy()) < 1e-5


@pytest.mark.parametrize("form", [as_gemma_3, as_one_that_sees])
@pytest.mark.parametrize(
    ("model_type", "outer"),
    [("gemma3_text", "gemma3"), ("ministral3", "mistral3"), ("mistral", "mistral3")],
)
def test_names_of_either_form_give_the_gradients_of_the_language_model(
    tiny: Tiny, tmp_path: Path, model_type: str, outer: str, form: Any
) -> None:
    plain = tiny.model(model_type, tie_word_embeddings=model_type == "gemma3_text")
    text = json.loads((plain / "config.json").read_text())
    folder = changed(plain, tmp_path / "sees", form)
    (folder / "config.json").write_text(json.dumps({"model_type": outer, "text_config": text}))
    assert f"layers of {outer} are computed by" in str(left_to_transformers({"model_type": outer}))
    assert read_shape(folder).counted == read_shape(plain).counted
    batch = tiny.batch(4, "causal-lm")
    for method in ("lora", "full"):
        settings: dict[str, Any] = {"task": "causal-lm", "method": method}
        configs = [tiny.config(model, **settings) for model in (folder, plain)]
        mine, expected = (build_layout(Path(one.model.path), one) for one in configs)
        if method == "lora":
            first = mine.blocks[0].tensors[0].name
            assert first.startswith("base_model.model.model.language_model.layers.0.")
        replica, weights = start(plain, configs[1])
        wanted = by_name(expected, gradient(replica, batch)[0])
        values = by_name(expected, weights)
        replica, _ = start(folder, configs[0])
        replica.write_trainable(np.concatenate([values[name] for name in names(mine)]))
        found = by_name(mine, gradient(replica, batch)[0])
        assert found.keys() == wanted.keys()
        for name, part in found.items():
            assert relative(part, wanted[name]) < 1e-5, name


def names(layout: GradientLayout) -> list[str]:
    """Return the names of a layout's tensors in the language model."""
    return [language_name(slot.name.removeprefix(PEFT_PREFIX)) for slot in layout.tensors()]


def by_name(layout: GradientLayout, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of a flat vector."""
    parts = (flat[slot.start : slot.stop] for slot in layout.tensors())
    return dict(zip(names(layout), parts, strict=True))
