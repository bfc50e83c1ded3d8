"""A plan's parameters are the model's own, or are called an estimate."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.families import COMPUTED_HERE
from trainer.model.families import FAMILIES
from trainer.model.safetensors_headers import read_headers
from trainer.planning.model_config import parse_shape, read_shape

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

_ROTATED = {"rope_theta": 10_000.0}


@pytest.mark.parametrize("model_type", [*COMPUTED_HERE, "gemma", "mixtral", "gpt2", "gemma2"])
def test_parameters_are_counted_or_an_estimate(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    folder = tiny.model(model_type, num_key_value_heads=4)  # GPT-2 has no other number
    count = sum(math.prod(header.shape) for header in read_headers(folder).values())
    whole = read_shape(folder)
    assert (whole.counted, whole.remark) == (count, "")
    shutil.copy(folder / "config.json", tmp_path)
    planned = read_shape(tmp_path)
    if model_type != "gemma2":  # it has two norms more in a layer
        assert planned.parameters == count
    assert ("estimated" in planned.remark) is (FAMILIES[model_type].code == "transformers")


@pytest.mark.parametrize("model_type", [*(n for n, f in FAMILIES.items() if not f.listed), "new"])
def test_of_a_family_that_is_not_listed_the_plan_is_an_estimate(model_type: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tree = {"model_type": model_type, "vocab_size": 300, "max_position_embeddings": 512, **sizes}
    shape = parse_shape(json.loads(json.dumps({**tree, **_ROTATED})), "config.json", "model")
    assert f"architecture {model_type} is not known here" in shape.remark
    assert shape.remark.endswith("which is an estimate")
    assert shape.positions == 0  # a rotary embedding has no table
    assert parse_shape(tree, "config.json", "model").positions == (0 if shape.gated else 512)
