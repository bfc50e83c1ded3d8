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
    check_adapter,
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
_INDEXED = {**_LATENT, "index_topk": 4}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
_DECODER = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    "is_encoder_decoder": False,
}
_DECODERS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "trocr", "whisper"),
)
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_DECODERS, _DECODER),
    "aria_text": {"moe_num_experts": 4},
    "bamba": {**_STATES, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        **_WINDOWS,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROTARY),
        "sliding_window": 16,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk": 64,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": 32,
    },
    "ernie4_5_moe": {"moe_num_experts": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "falcon_mamba": {"state_size": 16},
    "gemma3n_text": {
        **_WINDOWS,
        "intermediate_size": [128, 128],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_WINDOWS,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_unified_text": _WINDOWS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        **_STATES,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"],
    },
    "hrm_text": {"num_layers_per_stack": 1},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "kimi_linear": {
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_experts_per_token": 2,
        "q_lora_rank": None,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 128, "num_local_experts": 4, "moe_layers": [1]},
    "longcat_flash": {
        **_LATENT,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "modernbert-decoder": _WINDOWS,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "prophetnet": {
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "is_encoder_decoder": False,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "attention_head_size": 16,
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 32],
        "feed_forward_size": 128,
    },
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xglm": {"attention_heads": 4, "d_model": 64, "num_layers": 2, "ffn_dim": 128},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xlnet": {"d_inner": 128},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "mamba_d_state": 16,
        "use_mamba_kernels": False,
        "mamba_headdim": 16,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid"],
        "router_hidden_size": 16,
    },
}
TRAINS = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "bamba", "bart", "beam", "bigbird_pegasus"),
    *("bitnet", "blenderbot", "blenderbot-small", "bloom", "codegen", "cohere", "cohere2_moe"),
    *("cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("diffllama", "doge", "dots1", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma4_text"),
    *("gemma4_unified_text", "glm", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt-sw3"),
    *("gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "lfm2_moe", "lfm3"),
    *("llama4_text", "longcat_flash", "mamba2", "marian", "mbart", "mellum", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "moshi", "mpt", "mvp"),
    *("nanochat", "nemotron", "olmo", "olmo_hybrid", "olmoe", "opt", "pegasus", "persimmon", "phi"),
    *("phimoe", "plbart", "qwen2_moe", "seed_oss", "solar_open", "stablelm", "starcoder2"),
    *("vaultgemma", "xglm", "youtu", "zamba2", "zaya"),
)
MERGED = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "dt_proj"),
    "gemma3n_text": "correction_coefs",
}
"""Whose classes read the weights of such linears themselves."""
_OTHER_HEAD = "not by a linear lm_head on its hidden states"
_RENAMED = "of its files when it loads them, so that no adapter has its name; name other linears"
_BY_MORE = "makes its logits by more than its head"
_NO_TABLE = "has a row for each of vocab_size tokens, as an embedding has"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bert", "big_bird", "bert-generation", "biogpt", "camembert", "data2vec-text"),
            *("electra", "ernie", "gpt_neox_japanese", "megatron-bert", "modernbert-decoder"),
            *("reformer", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
            *("whisper", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
        ),
        _OTHER_HEAD,
    ),
    **dict.fromkeys(
        (
            *("axk2", "bailing_hybrid", "hy_v3", "hy_v4", "kimi_linear", "laguna"),
            "nemotron_h",
        ),
        _RENAMED,
    ),
    **dict.fromkeys(("cpmant", "inkling2_text", "rembert", "rwkv"), _NO_TABLE),
    **dict.fromkeys(("minicpm3", "recurrent_gemma", "xlstm"), _BY_MORE),
    "deepseek_v4": "tid2eid is stored as I64, need one of",
    "hrm_text": "2 layers lie in no single list of modules, but in model.H_module.layers",
    "openai-gpt": "has transformer.h.0.attn.c_attn as Conv1D, which gets no adapter",
    "prophetnet": "ProphetNetForCausalLM cannot compute here: ",
    "xlm": "2 layers lie in no single list of modules, but in transformer.attentions",
}
"""Why the others are refused."""
PATHS = {
    "gemma4_text": "layer_scalar: the model has 0 elements of it to train, its files have 1; set",
    "granitemoehybrid": "experts.down_proj: the model has 32768 elements .* its files have 0; set",
    **dict.fromkeys(("gpt_neo", "olmoe", "phi"), ""),
}
"""A tied head and buffers in files, recurrent layers, no gate, experts, a head with a bias; why
full fine-tuning is refused: the files hold what the class does not train, or in another form."""
SEES = (
    *("dots3_note", "emu3", "fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "llama4"),
    *("mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen4_exp"),
)
"""Models that see or hear; not tried, but for Gemma 3 (`test_models_that_see.py`)."""
UNTRIED = {
    "blt": "bytes, whose patches a second model chooses",
    "dbrx": "this version of transformers cannot build its attention: no rope_theta",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts from another model's hidden states",
    ),
    "gemma3n": "needs the package timm",
    "git": "sees pictures in its own layers, without a text_config",
    "inkling_text": "this version of transformers cannot build it: no tie_word_embeddings",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "codes of sound, without a text_config"),
    **dict.fromkeys(("qwen4_exp_text", "zamba"), "PEFT finds linears that its files do not have"),
}
"""Why no small model of these is compared."""


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
@pytest.mark.parametrize("model_type", MERGED)
def test_a_class_that_reads_weights_itself_trains_as_its_merged_model(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    """PEFT leaves such an adapter out, but for the merged weights."""
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    batch = tiny.batch(6, "causal-lm")
    _, found, _ = gradient(start(folder, config)[0], batch)
    assert re.search(f"merge before use with PEFT.*{MERGED[model_type]}", caplog.text)
    model = theirs(adapter, folder, config)
    apart = their_loss(model, batch).item()
    merged = their_loss(model.merge_and_unload(), batch).item()
    assert found.loss_sum == pytest.approx(merged, rel=1e-6)
    if model_type != "gemma3n_text":  # small coefficients, which its gradient shows
        assert found.loss_sum != pytest.approx(apart, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model_type", PATHS)
def test_adapters_and_whole_models_are_read_back(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    """All that is done with a listed family is done with these, which differ in structure."""
    folder = write_tiny(tmp_path / "model", model_type)
    check_adapter(tiny, folder, tmp_path)
    batch = tiny.batch(6, "causal-lm")
    config = tiny.config(folder, task="causal-lm", method="full")
    if PATHS[model_type]:
        with pytest.raises(InputError, match=PATHS[model_type]):
            start(folder, config)
        return
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    trained = write_trained(tmp_path / "full", folder, config, layout, weights)
    model = theirs(trained, folder, config)
    loss = their_loss(model, batch)
    loss.backward()
    replica, _ = start(folder, config)
    mine, found, _ = gradient(replica, batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert replica.evaluate(batch).loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5
    quantised = tiny.config(folder, task="causal-lm", model__quantization="nf4")
    exact = gradient(start(folder, tiny.config(folder, task="causal-lm"))[0], batch)[0]
    assert 1e-4 < relative(gradient(start(folder, quantised)[0], batch)[0], exact) < 0.5


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
    places = [*TRAINS, *MERGED, *REFUSED, *SEES, *UNTRIED]
    assert listed | {*places} >= set(ALL)
    assert len(places) == len({*places})


class Sees(nn.Module):
    """Attention to all tokens, with what a class of transformers has."""

    def __init__(self, **does: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(300, 16), nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 300, bias=True)
        if does.get("elsewhere"):
            self.head = self.lm_head
            del self.lm_head
        self.model, self.does = self, does

    def get_output_embeddings(self) -> nn.Module:
        return self.head

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
        ("elsewhere", "Sees makes its logits by head, not by a linear lm_head"),
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
