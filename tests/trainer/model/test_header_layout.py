"""The layout of models that transformers' code computes, from headers as they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.published_forms import Weights, as_one_that_sees, as_openai, changed
from trainer.model.config_keys import list_notices
from trainer.model.layout import build_layout
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_5_text", "qwen3_5_moe_text"])
def test_published_names_give_the_same_gradients(
    tiny_model: TinyModel, make_config: MakeConfig, tmp_path: Path, model_type: str, method: str
) -> None:
    """Every tensor is found, and the model that transformers loads is the same."""
    import torch

    from trainer.replica.torch.loader import load_model

    folder = tiny_model(model_type)
    if model_type == "gpt2":
        other = changed(folder, tmp_path / "published", as_openai)
    else:
        text = json.loads((folder / "config.json").read_text())
        outer = model_type.removesuffix("_text")
        tree = {"model_type": outer, "text_config": text, "tie_word_embeddings": True}
        other = changed(folder, tmp_path / "published", as_one_that_sees, **tree)
    config = make_config(folder, task="causal-lm", method=method)
    assert build_layout(other, config).digest == build_layout(folder, config).digest
    mine, theirs = (load_model(path, config, torch.device("cpu")) for path in (other, folder))
    expected = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: v for n, v in weights.items() if not n.startswith(names)}


@pytest.mark.parametrize(
    ("change", "tree", "settings", "message"),
    [
        (dict, {"num_hidden_layers": 3}, {}, r"model\.layers\.2\.\* is missing from the weights"),
        (dict, {"num_hidden_layers": 1}, {}, r"model\.layers\.1\..*, config\.json says 1 layers"),
        (dict, {"num_hidden_layers": "2"}, {}, "num_hidden_layers must be a positive integer"),
        (without("model.embed_tokens"), {}, {}, r"model\.embed_tokens\.weight is missing"),
        (
            dict,
            {"tie_word_embeddings": False},
            {"method": "full", "task": "causal-lm"},
            r"lm_head\.weight is missing",
        ),
        (
            lambda weights: {n: v.astype(np.int8) for n, v in weights.items()},
            {},
            {},
            "is stored as I8, need one of F32, F16, BF16",
        ),
        (
            dict,
            {},
            {"lora__target_modules": ["qkv_prj"]},
            r"no linear qkv_prj, did you mean qkv_proj\? \(it has down_proj, gate_up_proj, ",
        ),
        (dict, {}, {"lora__lora_rank": 65}, "above 64, the full rank"),
    ],
)
def test_models_that_do_not_fit(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    tmp_path: Path,
    change: Callable[[Weights], Weights],
    tree: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    folder = changed(tiny_model("phi3"), tmp_path / "model", change, **tree)
    with pytest.raises(InputError, match=message) as caught:
        build_layout(folder, make_config(folder, **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "targets", "found"),
    [
        ("phi3", ["qkv_proj"], {"self_attn.qkv_proj"}),
        ("gpt2", ["c_proj"], {"attn.c_proj", "mlp.c_proj"}),
        ("gpt2", ["attn.c_proj"], {"attn.c_proj"}),
        (
            "mixtral",
            None,
            {
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                *("mlp.gate", "mlp.experts", "mlp.experts.base_layer"),
            },
        ),
        ("qwen3_moe", ["v_proj", "down_proj"], {"self_attn.v_proj", "mlp.experts"}),
        (
            "qwen3_5_text",
            ["out_proj", "o_proj"],
            {"linear_attn.out_proj", "self_attn.o_proj"},
        ),
    ],
)
def test_targets_are_ends_of_names_and_all_linears_by_default(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    model_type: str,
    targets: list[str] | None,
    found: set[str],
) -> None:
    folder = tiny_model(model_type)
    config = make_config(folder, **({"lora__target_modules": targets} if targets else {}))
    slots = [
        slot.name for slot in build_layout(folder, config).iter_tensors() if "lora_A" in slot.name
    ]
    paths = {re.sub(r".*\.(layers|h)\.\d+\.|\.lora_A\.weight", "", name) for name in slots}
    assert paths == found


def test_weights_that_transformers_would_draw_are_refused(
    tiny_model: TinyModel, make_config: MakeConfig, tmp_path: Path
) -> None:
    """It would initialise what is missing, and leave out what it does not know."""
    import torch

    from trainer.replica.torch.loader import load_model

    def load(change: Callable[[Weights], Weights], name: str) -> None:
        folder = changed(tiny_model("gemma2"), tmp_path / name, change)
        load_model(folder, make_config(folder), torch.device("cpu"))

    with pytest.raises(InputError, match=r"layers\.1\.input_layernorm\.weight is missing"):
        load(without("model.layers.1.input_layernorm"), "less")
    with pytest.raises(InputError, match=r"layers\.1\.extra\.weight is stored, and no part"):
        load(lambda w: {**w, "model.layers.1.extra.weight": np.ones(3, np.float32)}, "more")


def test_a_head_beside_a_tied_embedding_is_not_trained(
    tiny_model: TinyModel, make_config: MakeConfig, tmp_path: Path
) -> None:
    import torch

    from trainer.replica.torch.loader import load_model

    def both(weights: Weights) -> Weights:
        return {**weights, "lm_head.weight": -3 * weights["model.embed_tokens.weight"]}

    for model_type in ("llama", "phi3"):
        folder = tiny_model(model_type)
        config = make_config(folder, task="causal-lm", method="full")
        other = changed(folder, tmp_path / model_type, both)
        assert build_layout(other, config).digest == build_layout(folder, config).digest
        models: list[Any] = [
            load_model(path, config, torch.device("cpu")) for path in (other, folder)
        ]
        assert any("lm_head.weight is not used" in line for line in list_notices(other))
        assert torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)
