"""Adapters as PEFT writes them: the loss and the merged weights are PEFT's, or a line says why not.

Every adapter here is saved by PEFT itself, with all of its tensors drawn at random.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.trained_model import TrainedModel, load_trained, starting_weights
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on what these adapters train

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 12, 13, 14, 15, 16, 17]])
LINEARS = ["q_proj", "v_proj", "down_proj"]


def adapter_of(folder: Path, model_dir: Path, task: str = "CAUSAL_LM", **settings: Any) -> Any:
    """Save an adapter by PEFT; return PEFT's model with it, unmerged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, **settings}
    model = get_peft_model(base_of(model_dir, task), LoraConfig(task_type=task, **settings))
    draw = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            wide = 1.0 if "magnitude" in name else 0.1
            noise = torch.randn(parameter.shape, generator=draw) * 0.1
            parameter.data.copy_(parameter.data * wide + noise)
    model.save_pretrained(str(folder))
    return PeftModel.from_pretrained(base_of(model_dir, task), folder).eval()


def base_of(model_dir: Path, task: str = "CAUSAL_LM") -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    if task == "SEQ_CLS":
        return AutoModelForSequenceClassification.from_pretrained(
            model_dir, num_labels=3, dtype=torch.float32
        )
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.0\.mlp\.down_proj": 6},
        "alpha_pattern": {"v_proj": 3},
    },
    "some-layers": {"layers_to_transform": [1]},
    "excluded": {"target_modules": ".*_proj", "exclude_modules": ["o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"use_dora": True},
    "dora-rank-stabilised": {"use_dora": True, "use_rslora": True},
    "bias-of-b": {"lora_bias": True, "target_modules": ["q_proj"]},
    "embedding-saved": {"modules_to_save": ["embed_tokens"]},
    "head-and-embedding-saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norms-saved": {"modules_to_save": ["input_layernorm", "norm"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5, 9]}},
    "tokens-as-a-list": {"trainable_token_indices": [7, 8]},
    "tokens-of-the-head": {"trainable_token_indices": {"lm_head": [3, 4]}},
    "other-tokens-of-the-head": {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [5]}},
    "tokens-of-both": {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [3]}},
    "linear-saved": {"modules_to_save": ["q_proj"], "target_modules": ["v_proj"]},
    "block-saved": {"modules_to_save": ["layers.1.mlp"], "target_modules": ["q_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_merged_weights_are_pefts(
    name: str, tied: bool, tmp_path: Path, tiny_model: Any
) -> None:
    model_dir = tiny_model("qwen3", tie_word_embeddings=tied)
    peft = adapter_of(tmp_path / "adapter", model_dir, **CASES[name])
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
        base = base_of(model_dir)(input_ids=IDS).logits
    assert (expected - base).abs().max() > 1e-2, "the adapter does something"
    actual = logits_of(load_trained(tmp_path / "adapter"))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)

    folder = merge_adapter(open_adapter(tmp_path / "adapter")[0], tmp_path / "merged")
    with torch.no_grad():
        again = base_of(folder)(input_ids=IDS).logits
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=2e-5)
    # PEFT cannot merge into a linear without a bias, nor into a head that is still tied.
    if name != "bias-of-b" and not (tied and name.endswith("tokens-of-the-head")):
        state = peft.merge_and_unload().state_dict()
        for tensor, values in load_file(folder / "model.safetensors").items():
            np.testing.assert_allclose(values, state[tensor].numpy(), rtol=1e-6, atol=1e-7)


def logits_of(trained: TrainedModel) -> torch.Tensor:
    """Return what transformers computes with the weights of a trained model."""
    from peft import LoraConfig, get_peft_model

    model = base_of(trained.base_dir)
    if trained.weights is None:
        with torch.no_grad():
            return model(input_ids=IDS).logits
    values = {
        slot.name: torch.from_numpy(trained.weights[slot.start : slot.stop].reshape(slot.shape))
        for slot in trained.layout.iter_tensors()
    }
    lora = trained.config.lora
    settings = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=list(lora.linears),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if (plain := name.replace(".default", "")) in values:
            parameter.data.copy_(values.pop(plain))
    assert not values
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    "theirs", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q": 9}}]
)
def test_a_run_begins_from_an_adapter(
    theirs: dict[str, Any], tmp_path: Path, tiny_model: Any, make_config: MakeConfig
) -> None:
    """Also if it has a lower rank, other scales and fewer linears than the run."""
    model_dir, folder = tiny_model("qwen3"), tmp_path / "adapter"
    peft = adapter_of(folder, model_dir, **theirs)
    settings = {"task": "causal-lm", "model__adapter": str(folder), "lora__lora_alpha": 20}
    config = make_config(model_dir, **settings, lora__lora_rank=6, lora__target_modules=None)
    layout = build_layout(model_dir, config)
    weights = starting_weights(layout, model_dir, config)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    actual = logits_of(TrainedModel(folder, config, model_dir, layout, weights))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    fresh = initial_weights(layout, model_dir, config)
    beside = [
        s for s in layout.iter_tensors() if "o_proj.lora_A" in s.name or "gate_proj" in s.name
    ]
    assert all(np.array_equal(weights[s.start : s.stop], fresh[s.start : s.stop]) for s in beside)

    for chosen in ({"lora__lora_rank": 3}, {"lora__target_modules": ["q_proj"]}):
        small = make_config(model_dir, **settings, **chosen)
        with pytest.raises(InputError, match="on down_proj, q_proj, v_proj; set task"):
            starting_weights(build_layout(model_dir, small), model_dir, small)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_biases_of_b_in_other_families(family: str, tmp_path: Path, tiny_model: Any) -> None:
    model_dir = tiny_model(family)
    targets = ["q_proj", "down_proj"] if family == "llama" else ["q_proj", "v_proj"]
    peft = adapter_of(tmp_path / "adapter", model_dir, lora_bias=True, target_modules=targets)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    actual = logits_of(load_trained(tmp_path / "adapter"))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    if family == "qwen2":  # whose o_proj can have none
        adapter_of(tmp_path / "other", model_dir, lora_bias=True, target_modules=["o_proj"])
        with pytest.raises(InputError, match=r"has lora_bias for .*o_proj, which has no bias"):
            load_trained(tmp_path / "other")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize(
    ("family", "targets"), [("qwen2", ["q_proj", "down_proj"]), ("gpt2", ["c_attn", "c_fc"])]
)
def test_biases_that_were_trained(
    family: str, targets: list[str], bias: str, tmp_path: Path, tiny_model: Any
) -> None:
    model_dir = tiny_model(family)
    peft = adapter_of(tmp_path / "adapter", model_dir, bias=bias, target_modules=targets)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    assert any(name.endswith(".bias") for name in open_adapter(tmp_path / "adapter")[0].saved)
    actual = logits_of(load_trained(tmp_path / "adapter"))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3"])
def test_other_families(family: str, dora: bool, tmp_path: Path, tiny_model: Any) -> None:
    model_dir = tiny_model(family)
    settings = {"target_modules": "all-linear", "use_dora": dora}
    peft = adapter_of(tmp_path / "adapter", model_dir, **settings)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    folder = merge_adapter(open_adapter(tmp_path / "adapter")[0], tmp_path / "merged")
    with torch.no_grad():
        merged = base_of(folder)(input_ids=IDS).logits
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=3e-5)
    trained = load_trained(tmp_path / "adapter")
    assert trained.config.method == ("full" if dora else "lora")
    torch.testing.assert_close(logits_of(trained), expected, rtol=1e-5, atol=3e-5)


def test_a_classifier_of_pefts(tmp_path: Path, tiny_model: Any) -> None:
    model_dir = tiny_model("qwen3", pad_token_id=0)
    peft = adapter_of(tmp_path / "adapter", model_dir, "SEQ_CLS", use_dora=True)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    trained = load_trained(tmp_path / "adapter")
    assert trained.config.num_classes == 3
    with torch.no_grad():
        actual = base_of(trained.base_dir, "SEQ_CLS")(input_ids=IDS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def change(folder: Path, tensors: Any = None, **settings: Any) -> Path:
    """Change an adapter's settings and tensors; a tensor that is None is removed."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    if tensors:
        file = folder / "adapter_model.safetensors"
        held = {**load_file(file), **tensors}
        save_file({name: value for name, value in held.items() if value is not None}, file)
    return folder


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, {}, "changed the base's own weights"),
        ({"peft_type": "IA3"}, {}, "only LoRA adapters"),
        ({"task_type": "SEQ_2_SEQ_LM"}, {}, "only LoRA adapters"),
        ({"r": "x"}, {}, "r must be a number above zero, got 'x'"),
        ({"r": 5}, {}, "lora_A.weight has rank 4, adapter_config.json says 5"),
        ({"use_dora": True}, {}, "lacks lora_magnitude_vector"),
        ({"target_modules": [*LINEARS, "k_proj"]}, {}, "contains no tensor for k_proj"),
        ({}, {f"{STEM}.lora_B.weight": None}, "q_proj lacks lora_B"),
        ({}, {f"{STEM}.lora_E": np.ones(4, np.float32)}, f"the tensor {STEM}.lora_E is not read"),
        ({}, {f"{STEM}.lora_A.weight": np.ones((4, 3), np.float32)}, "does not fit"),
        (
            {},
            {"base_model.model.vision.weight": np.ones((4, 3), np.float32)},
            "the tensor vision.weight [4, 3] does not fit",
        ),
        (
            {},
            {"base_model.model.model.embed_tokens.weight": np.ones((4, 3), np.float32)},
            "the tensor model.embed_tokens.weight [4, 3] does not fit",
        ),
        ({"base_model_name_or_path": None}, {}, "names no base model; give it with --base"),
        ({"base_model_name_or_path": "/gone"}, {}, "/gone: no such model folder"),
    ],
)
def test_what_cannot_be_used_is_refused(
    settings: dict[str, Any], tensors: Any, reason: str, tmp_path: Path, tiny_model: Any
) -> None:
    adapter_of(tmp_path / "adapter", tiny_model("qwen3"))
    with pytest.raises(InputError) as caught:
        load_trained(change(tmp_path / "adapter", tensors, **settings))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lora_on_a_tied_embedding_is_refused(tmp_path: Path, tiny_model: Any) -> None:
    adapter_of(tmp_path / "adapter", tiny_model("qwen3"), target_modules=["embed_tokens"])
    with pytest.raises(InputError, match="is not read; merge it with PEFT"):
        load_trained(tmp_path / "adapter")


def test_another_base_of_the_same_name_or_path(tmp_path: Path, tiny_model: Any) -> None:
    adapter_of(tmp_path / "adapter", tiny_model("qwen3"))
    other = shutil.copytree(tiny_model("qwen3"), tmp_path / "other")
    _, lines = open_adapter(tmp_path / "adapter", str(other))
    assert len(lines) == 1
    assert lines[0].endswith(f"as its base, {other} is used; they are not compared")
    assert open_adapter(tmp_path / "adapter")[1] == []
    change(tmp_path / "adapter", lora_new=True)
    _, (line,) = open_adapter(tmp_path / "adapter")
    assert line.endswith("adapter_config.json that are not used: 'lora_new' (1 time)")
