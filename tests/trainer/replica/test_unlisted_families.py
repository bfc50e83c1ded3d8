"""Other causal language models of transformers train as there and in PEFT, or are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn

from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from tests.trainer.replica.test_families import (
    pytestmark,
    their_gradient,
    their_loss,
    theirs,
    write_trained,
)
from trainer.model.families import FAMILIES, PLAIN
from trainer.model.layout import build_layout
from trainer.replica.torch.linear import LoraLinear
from trainer.replica.torch.unlisted import check_class
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

__all__ = ["pytestmark"]

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("head_dim", "mamba_d_head", "mamba_head_dim", "ssm_state_size"), 16),
    **{"qk_rope_head_dim": 8, "first_k_dense_replace": 1, "vocab_size": 300},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512},
}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
OWN: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4},
    "bamba": {**_STATES, "attn_layer_indices": [1]},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3"), _LATENT),
    "ernie4_5_moe": {"moe_num_experts": 4},
    "granitemoehybrid": {
        **_STATES,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
TRAINS = (
    *("afmoe", "apertus", "arcee", "aria_text", "bamba", "bitnet", "bloom", "cohere"),
    *("cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "glm"),
    *("glm4_moe", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe", "granitemoehybrid"),
    *("granitemoeshared", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "jetmoe", "lfm2_moe", "lfm3", "mellum", "minimax"),
    *("minimax_m2", "minimax_m3_vl_text", "ministral", "mpt", "nanochat", "nemotron", "olmo"),
    *("olmo_hybrid", "olmoe", "opt", "persimmon", "phimoe", "qwen2_moe", "seed_oss"),
    *("stablelm", "starcoder2", "vaultgemma"),
)
REFUSED: dict[str, str] = {
    "axk2": "lora.target_modules: AXK2ForCausalLM has no module",
    "bailing_hybrid": "model.embed_tokens.weight is missing from the weights",
    **dict.fromkeys(
        (*("bart", "bigbird_pegasus", "blenderbot-small", "marian", "mbart"),),
        "num_hidden_layers must be a positive integer, got None",
    ),
    **dict.fromkeys(
        (*("beam", "hunyuan_v1_moe"),),
        "target_parameters: no parameter gate.weight of experts or routers",
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "biogpt", "camembert", "cpmant", "ctrl"),
            *("data2vec-text", "electra", "inkling2_text", "mamba", "megatron-bert", "roberta"),
            *("rwkv",),
        ),
        "model.layers.0.* is missing from the weights",
    ),
    "codegen": "CodeGenForCausalLM has no head lm_head that is a product without",
    "deepseek_v4": "model.layers.0.ffn.gate.tid2eid is stored as I64, need one of",
    "gptj": "GPTJForCausalLM has no head lm_head that is a product without",
    "hy_v3": "lora.target_modules: HYV3ForCausalLM has no module",
    "laguna": "lora.target_modules: LagunaForCausalLM has no module",
    "minicpm3": "MiniCPM3ForCausalLM makes its logits by more than its head, which",
    "phi": "PhiForCausalLM has no head lm_head that is a product without bias",
    "recurrent_gemma": "RecurrentGemmaForCausalLM makes its logits by more than its head,",
    "xglm": "num_attention_heads must be a positive integer, got None",
}
"""Why the others are refused."""
UNTRIED = (
    *("axk1", "blenderbot", "blt", "cohere_compass_text", "dbrx", "deepseek_v32"),
    *("dots3_note", "dots3_note_text", "emu3", "ernie", "falcon_h1", "falcon_mamba", "flint"),
    *("fuyu", "gemma3", "gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant"),
    *("gemma4_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text"),
    *("git", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt_neo"),
    *("gpt_neox_japanese", "granitemoe_swa", "hrm_text", "hy_v4", "inkling_text"),
    *("kimi_linear", "kolibri1", "llama4", "llama4_text", "longcat_flash", "mamba2"),
    *("mimo_v2_flash", "mllama", "modernbert-decoder", "moshi", "moss_transcribe_diarize"),
    *("musicgen", "musicgen_melody", "mvp", "nemotron_h", "openai-gpt", "pegasus"),
    *("phi4_multimodal", "plbart", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer"),
    *("rembert", "roberta-prelayernorm", "roc_bert", "roformer", "solar_open", "trocr"),
    *("whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu"),
    *("zamba", "zamba2", "zaya"),
)
"""Not tried: the smallest models of most of them need more than `SIZES`."""


def write_tiny(folder: Path, model_type: str) -> Path:
    """Write a model of random weights, as small as its class allows."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    has = vars(kind())
    sizes = {key: value for key, value in SIZES.items() if key in has}
    tree = kind(**{**sizes, **OWN.get(model_type, {})})
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(tree)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "head" not in name:  # else zeros and ones hide mix-ups
            torch.nn.init.normal_(parameter, mean=0.5, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("model_type", TRAINS)
def test_a_step_is_that_of_transformers_and_peft(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    model = theirs(write_trained(tmp_path / "out", folder, config, layout, weights), folder, config)
    batch = tiny.batch(6, "causal-lm")
    loss = their_loss(model, batch)
    loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    mine, found, _ = gradient(start(folder, config)[0], batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5


@pytest.mark.long
def test_a_class_that_reads_weights_itself_trains_as_its_merged_model(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Jamba's `dt_proj`: PEFT leaves its adapter out, but for the merged weights."""
    folder = write_tiny(tmp_path / "model", "jamba")
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    batch = tiny.batch(6, "causal-lm")
    _, found, _ = gradient(start(folder, config)[0], batch)
    assert re.search(r"merge before use with PEFT.*dt_proj", caplog.text)
    model = theirs(adapter, folder, config)
    apart = their_loss(model, batch).item()
    merged = their_loss(model.merge_and_unload(), batch).item()
    assert found.loss_sum == pytest.approx(merged, rel=1e-6)
    assert found.loss_sum != pytest.approx(apart, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model_type", REFUSED)
def test_others_are_refused_with_a_reason(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    with pytest.raises(InputError) as refusal:
        start(folder, config)
    assert REFUSED[model_type] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_family_of_transformers_has_its_place() -> None:
    """A family that comes with another version of transformers has to be looked at."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALL

    listed = {name for name, family in FAMILIES.items() if family.listed}
    assert listed | {*TRAINS, *REFUSED, *UNTRIED, "jamba"} >= set(ALL)
    assert not {*TRAINS} & {*REFUSED}


class Sees(nn.Module):
    """Attention to all tokens, with what a class of transformers has."""

    def __init__(self, **does: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(300, 16), nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 300, bias=does.get("biased", False))
        self.model, self.does = self, does

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        x = self.embed(input_ids)
        seen = x.mean(1, keepdim=True) if self.does.get("sees") else x.cumsum(1)
        hidden = self.norm(x + seen)
        if self.does.get("draws"):
            hidden = hidden + torch.rand_like(hidden)
        return SimpleNamespace(
            last_hidden_state=hidden,
            logits=self.lm_head(hidden) * (2 if self.does.get("scales") else 1),
        )


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("sees", "Sees is not causal: a token changes those before it"),
        ("draws", "Sees draws random numbers while it trains"),
        ("scales", "Sees makes its logits by more than its head"),
        ("biased", "Sees has no head lm_head that is a product without bias"),
    ],
)
def test_what_a_class_does_otherwise_is_named(tmp_path: Path, does: str, reason: str) -> None:
    exact = torch.autocast("cpu", enabled=False)
    check_class(Sees(), tmp_path, (), PLAIN, exact)
    with pytest.raises(InputError, match=reason):
        check_class(Sees(**{does: True}), tmp_path, (), PLAIN, exact)
    with pytest.raises(InputError, match=r"embed as Embedding, which gets no adapter"):
        check_class(Sees(), tmp_path, ("embed",), PLAIN, exact)


def test_a_weight_that_is_read_alone_has_its_adapter() -> None:
    torch.manual_seed(0)
    made = LoraLinear(nn.Linear(8, 6), 2, 0.5, torch.device("cpu"))
    nn.init.normal_(made.lora_A.weight)
    nn.init.normal_(made.lora_B.weight)
    x, grads = torch.randn(3, 8), list[tuple[torch.Tensor, ...]]()
    sides = made.lora_A.weight, made.lora_B.weight
    for y in (made(x), nn.functional.linear(x, made.weight, made.bias)):
        grads.append((y, *torch.autograd.grad(y.square().sum(), sides)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert made.reads_weight
    made.enabled = False
    assert made.weight is made.base_layer.weight


def test_a_type_that_transformers_lacks_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.model("granite"), tmp_path / "model")
    path = folder / "config.json"
    tree = {**json.loads(path.read_text()), "model_type": "mine", "auto_map": {"AutoModel": "x"}}
    path.write_text(json.dumps(tree))
    reason = r"no causal language model of model_type mine; code in a model's folder .* never run"
    with pytest.raises(InputError, match=reason):
        tiny.start(folder, task="causal-lm")
