"""What config.json asks for is computed, refused by its key, or said (F-IN-001)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from tests import ROOT
from tests.families import COMPUTED_HERE
from trainer.model.architecture import parse_architecture
from trainer.model.config_keys import CONFIG_KEYS, list_notices
from trainer.model.families import FAMILIES, explain_transformers_only
from trainer.model.layout import build_layout
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel

Edited = Callable[..., Path]


@pytest.fixture
def edited(tiny_model: TinyModel, tmp_path: Path) -> Edited:
    """Return a maker of a model folder whose config.json has other values."""

    def make(model_type: str = "llama", **settings: Any) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_model(model_type), folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return folder

    return make


@pytest.mark.parametrize("key", CONFIG_KEYS.refused)
def test_a_key_of_another_family_is_refused_by_its_name(
    edited: Edited, make_config: MakeConfig, key: str
) -> None:
    folder = edited(**{key: 2})
    with pytest.raises(InputError, match=rf"config\.json: '{key}' changes what other .* compute"):
        build_layout(folder, make_config(folder))
    folder = edited(**{key: None})
    build_layout(folder, make_config(folder))


@pytest.mark.parametrize(
    ("model_type", "settings", "key"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_a_key_that_only_some_families_have_is_refused_for_the_others(
    edited: Edited, make_config: MakeConfig, model_type: str, settings: dict[str, Any], key: str
) -> None:
    folder = edited(model_type, **settings)
    with pytest.raises(InputError, match=key):
        build_layout(folder, make_config(folder))


def test_values_that_change_nothing_are_accepted(edited: Edited, make_config: MakeConfig) -> None:
    neutral = {
        "logits_scaling": 1.0,
        "embedding_multiplier": 1,
        "rope_interleaved": False,
        "num_experts": 0,
        "attention_bias": False,
        "sliding_window": None,
        "pretraining_tp": 2,
    }
    folder = edited(**neutral)
    build_layout(folder, make_config(folder))
    assert list(list_notices(folder)) == []


def test_unknown_keys_and_dropout_are_said_once(edited: Edited) -> None:
    folder = edited(rope_frobnication=3, auto_map={"AutoModel": "x"}, attention_dropout=0.1)
    assert list(list_notices(folder)) == [
        "config.json: attention_dropout 0.1 is not applied: training has no dropout",
        "keys of config.json that are not used: 'rope_frobnication' (1 time), 'auto_map' (1 time)",
    ]


WINDOW = {"sliding_window": 16}
USED = {**WINDOW, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("model_type", "settings", "length", "reason"),
    [
        ("llama", {}, None, None),
        ("llama", {"hidden_act": "gelu"}, None, "hidden_act 'gelu'"),
        ("llama", {"partial_rotary_factor": 0.5}, None, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, None, "rope_type 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, None, None),
        ("llama", {"rope_scaling": {"attention_factor": 2.0}}, None, "attention_factor"),
        ("mistral", WINDOW, 16, None),
        ("mistral", WINDOW, 17, "sliding_window 16 is shorter than a row of 17"),
        ("mistral", WINDOW, None, "sliding_window 16 is shorter than a row of 512"),
        ("mistral", {"sliding_window": None}, None, None),
        ("mistral", {}, 4097, "sliding_window 4096"),
        ("qwen3", WINDOW, 17, None),
        ("qwen3", USED, 17, "sliding_window 16"),
        ("qwen3", {**USED, "layer_types": ["full_attention"] * 2}, 17, None),
        ("qwen2", {**USED, "layer_types": ["sliding_attention"] * 2}, 17, "sliding_window 16"),
        ("gpt2", {}, None, "layers of gpt2"),
    ],
)
def test_what_is_left_to_transformers(
    model_type: str, settings: dict[str, Any], length: int | None, reason: str | None
) -> None:
    tree = {"model_type": model_type, "max_position_embeddings": 512, **settings}
    found = explain_transformers_only(tree, length)
    assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.parametrize("model_type", COMPUTED_HERE)
def test_keys_that_config_json_lacks_are_what_transformers_assumes(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    tree = {name: getattr(theirs, name) for name in (*sizes, "vocab_size")}
    mine = parse_architecture({"model_type": model_type, **tree}, "config.json")
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // mine.num_heads
    assert mine.tied == theirs.tie_word_embeddings
    assert (mine.num_kv_heads, mine.head_dim) == (theirs.num_key_value_heads, head_dim)
    rotated = getattr(theirs, "no_rope_layers", [1] * mine.num_layers)
    assert mine.unrotated == {layer for layer, turns in enumerate(rotated) if not turns}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_classes_are_those_of_transformers(model_type: str) -> None:
    family = FAMILIES[model_type]
    if not family.listed:
        return
    nested = ("qwen3_5", "qwen3_5_moe")
    kind = transformers.CONFIG_MAPPING[f"{model_type}_text" if model_type in nested else model_type]
    for auto, name in (
        (transformers.AutoModelForCausalLM, family.causal),
        (transformers.AutoModelForSequenceClassification, family.classifier),
    ):
        known: Any = auto._model_mapping
        assert (known[kind].__name__ if kind in known else "") == name


def test_the_page_lists_the_families_that_motleys_own_decoder_computes() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if "| Motley's own decoder |" in line)
    assert tuple(row.split("|")[1].strip().lower().split(", ")) == COMPUTED_HERE
