"""A plan's parameters are the model's own, or are called an estimate."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests import families
from tests.families import COMPUTED_HERE
from trainer.model.families import FAMILIES
from trainer.model.family_refusals import REFUSED
from trainer.model.safetensors_headers import read_headers
from trainer.planning.model_config import parse_shape, read_shape

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

SIZES = {
    **{"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128},
    "max_position_embeddings": 512,
}
_ROTATED = {"rope_theta": 10_000.0}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_parameters_of_a_listed_family_are_those_of_its_class(
    model_type: str, biases: bool
) -> None:
    """Of small sizes and of those that the class assumes, none of which are weights here."""
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    small = {**SIZES, **families.FAMILIES[model_type]}
    sizes = {key: value for key, value in small.items() if value is not None}
    if model_type == "gpt2":
        del sizes["num_key_value_heads"]  # it has no other number than that of queries
    asked = [key for key in ("attention_bias", "mlp_bias", "conv_bias") if hasattr(kind(), key)]
    for settings in (sizes, {}):
        tree = kind(**{**settings, **dict.fromkeys(asked, biases)})
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(tree)
        count = sum(parameter.numel() for parameter in model.parameters())
        for written in (tree.to_dict(), {**tree.to_diff_dict(), "model_type": model_type}):
            planned = parse_shape(written, "config.json", "model")
            assert (planned.parameters, planned.remark) == (count, "")


@pytest.mark.parametrize(
    ("model_type", "key", "value", "types"),
    [
        ("qwen3_next", "full_attention_interval", 2, ["linear_attention", "full_attention"] * 2),
        ("lfm2", "full_attn_idxs", [1, 3], ["conv", "full_attention"] * 2),
    ],
)
def test_keys_that_older_files_have_say_the_kinds_of_layers(
    model_type: str, key: str, value: Any, types: list[str]
) -> None:
    tree = {**SIZES, **families.FAMILIES[model_type], "model_type": model_type}
    tree = {name: found for name, found in tree.items() if found is not None}
    tree |= {"num_hidden_layers": 4, "layer_types": types}
    wanted = parse_shape(tree, "config.json", "model")
    del tree["layer_types"]
    assert parse_shape({**tree, key: value}, "config.json", "model") == wanted


@pytest.mark.parametrize("model_type", [*COMPUTED_HERE, "gemma", "mixtral", "gpt2", "gemma2"])
def test_parameters_of_weights_are_counted(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    folder = tiny.model(model_type, num_key_value_heads=4)  # GPT-2 has no other number
    count = sum(math.prod(header.shape) for header in read_headers(folder).values())
    whole = read_shape(folder)
    assert (whole.counted, whole.remark) == (count, "")
    shutil.copy(folder / "config.json", tmp_path)
    assert read_shape(tmp_path).parameters == count


@pytest.mark.parametrize("model_type", [*(n for n, f in FAMILIES.items() if not f.listed), "new"])
def test_of_a_family_that_is_not_listed_the_plan_is_an_estimate(model_type: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tree = {"model_type": model_type, "vocab_size": 300, "max_position_embeddings": 512, **sizes}
    shape = parse_shape(json.loads(json.dumps({**tree, **_ROTATED})), "config.json", "model")
    assert f"architecture {model_type} is not known here" in shape.remark
    assert shape.remark.endswith("which is an estimate")
    assert ("is not trained here: " in shape.remark) is (model_type in REFUSED)
    assert shape.positions == 0  # a rotary embedding has no table
    assert parse_shape(tree, "config.json", "model").positions == (0 if shape.gated else 512)
