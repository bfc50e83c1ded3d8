"""The families of models, one row for each `model_type` of transformers.

A row says whose code computes the layers, what its class assumes where config.json is silent, and
how its tensors are named. A new family is a new row, and the tests take it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.model.family import Family, SavedActivations
from trainer.model.family_refusals import FULL_REFUSED, REFUSED, RENAMED
from trainer.model.safetensors_headers import read_position_count
from trainer.system.errors import InputError

_TIED = {"tie_word_embeddings": True}
BIASES = ("attention_bias", "mlp_bias")
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_RECURRENT = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_QWEN3_5 = Family(
    code="transformers",
    gated_queries=True,
    causal="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    defaults={**_RECURRENT, "num_key_value_heads": 4},
    normalised_heads=True,
    ignored=r"^mtp\.|^model\.visual\.",
    packs=False,
    recurrent=True,
)
"""Also of models that see: their language model alone is trained."""
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    causal="Qwen3_5MoeForCausalLM",
    classifier="",
    defaults={**_RECURRENT, "num_key_value_heads": 2},
    experts=("gate_proj", "up_proj", "down_proj"),
    converts_experts=False,
)


_OTHER = Family(
    listed=False,
    logit_divisor="logits_scaling",
    logit_factor="logit_scale",
    logit_cap="final_logit_softcapping",
    packs=False,
    recurrent=True,
    kept=SavedActivations(norms=4, queries=3, repeated=True),
)
"""Any other causal language model of transformers."""
_STACKING = (
    *("afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen2_moe", "solar_open"),
)
"""Those whose stored experts PEFT takes for parameters of the class (`converted_targets`)."""
_DECODER_H = replace(_OTHER, gated=False, backbone="transformer", layers="h", embedding="wte")


FAMILIES: dict[str, Family] = {
    "llama": Family(
        code="motley",
        causal="LlamaForCausalLM",
        classifier="LlamaForSequenceClassification",
        keys=BIASES,
        gguf="llama",  # and so it calls a Mistral
        gguf_interleaved=True,
    ),
    "mistral": Family(
        code="motley",
        causal="MistralForCausalLM",
        classifier="MistralForSequenceClassification",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        keys=("sliding_window",),
    ),
    "qwen2": Family(
        code="motley",
        causal="Qwen2ForCausalLM",
        classifier="Qwen2ForSequenceClassification",
        biased=("q_proj", "k_proj", "v_proj"),
        keys=("attention_bias", *WINDOWS),
        gguf="qwen2",
    ),
    "qwen3": Family(
        code="motley",
        causal="Qwen3ForCausalLM",
        classifier="Qwen3ForSequenceClassification",
        defaults={"head_dim": 128},
        normalised_heads=True,
        keys=("attention_bias", *WINDOWS),
        gguf="qwen3",
    ),
    "smollm3": Family(
        code="motley",
        causal="SmolLM3ForCausalLM",
        classifier="SmolLM3ForSequenceClassification",
        defaults={
            **_TIED,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
        },
        keys=(*BIASES, *WINDOWS, "no_rope_layers", "no_rope_layer_interval"),
    ),
    "gemma": Family(
        code="transformers",
        causal="GemmaForCausalLM",
        classifier="GemmaForSequenceClassification",
        defaults={**_TIED, "head_dim": 256},
    ),
    "gemma2": Family(
        code="transformers",
        norms=4,
        causal="Gemma2ForCausalLM",
        classifier="Gemma2ForSequenceClassification",
        defaults={**_TIED, "head_dim": 256, "final_logit_softcapping": 30.0},
        logit_cap="final_logit_softcapping",
        kept=SavedActivations(norms=4, repeated=True, scores=2),
    ),
    "gemma3_text": Family(
        code="transformers",
        norms=4,
        causal="Gemma3ForCausalLM",
        classifier="Gemma3TextForSequenceClassification",
        defaults={**_TIED, "head_dim": 256},
        normalised_heads=True,
        logit_cap="final_logit_softcapping",
        kept=SavedActivations(norms=4, repeated=True),
    ),
    "phi3": Family(
        code="transformers",
        causal="Phi3ForCausalLM",
        classifier="Phi3ForSequenceClassification",
        kept=SavedActivations(queries=5),
    ),
    "olmo2": Family(
        code="transformers",
        norms_all_heads=True,
        causal="Olmo2ForCausalLM",
        classifier="Olmo2ForSequenceClassification",
        normalised_heads=True,
    ),
    "olmo3": Family(
        code="transformers",
        norms_all_heads=True,
        causal="Olmo3ForCausalLM",
        classifier="Olmo3ForSequenceClassification",
        normalised_heads=True,
        kept=SavedActivations(repeated=True),
    ),
    "ministral3": Family(
        code="transformers",
        causal="Ministral3ForCausalLM",
        classifier="Ministral3ForSequenceClassification",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "glm4": Family(
        code="transformers",
        norms=4,
        bare_output=True,
        causal="Glm4ForCausalLM",
        classifier="Glm4ForSequenceClassification",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        kept=SavedActivations(norms=4, queries=3),
    ),
    "cohere2": Family(
        code="transformers",
        norms=1,
        causal="Cohere2ForCausalLM",
        defaults={**_TIED, "logit_scale": 0.0625},
        logit_factor="logit_scale",
        kept=SavedActivations(repeated=True),
    ),
    "lfm2": Family(
        code="transformers",
        causal="Lfm2ForCausalLM",
        defaults={
            **_TIED,
            "num_key_value_heads": 8,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        normalised_heads=True,
        packs=False,
        recurrent=True,
    ),
    "granite": Family(
        code="transformers", causal="GraniteForCausalLM", logit_divisor="logits_scaling"
    ),
    "mixtral": Family(
        code="transformers",
        causal="MixtralForCausalLM",
        classifier="MixtralForSequenceClassification",
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=("w1", "w3", "w2"),
        moved=(("block_sparse_moe.", "mlp."),),
    ),
    "qwen3_moe": Family(
        code="transformers",
        causal="Qwen3MoeForCausalLM",
        classifier="Qwen3MoeForSequenceClassification",
        defaults={"num_key_value_heads": 4},
        normalised_heads=True,
        experts=("gate_proj", "up_proj", "down_proj"),
    ),
    "qwen3_next": Family(
        code="transformers",
        gated_queries=True,
        causal="Qwen3NextForCausalLM",
        classifier="Qwen3NextForSequenceClassification",
        defaults={**_RECURRENT, "num_key_value_heads": 2},
        normalised_heads=True,
        experts=("gate_proj", "up_proj", "down_proj"),
        ignored=r"^mtp\.",
        packs=False,
        recurrent=True,
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gpt_oss": Family(
        code="transformers",
        causal="GptOssForCausalLM",
        classifier="GptOssForSequenceClassification",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        transposed_experts=True,
        packs=False,
        kept=SavedActivations(inner=7, repeated=True, scores=1),
    ),
    "gpt2": Family(
        code="transformers",
        causal="GPT2LMHeadModel",
        classifier="GPT2ForSequenceClassification",
        defaults=_TIED,
        gated=False,
        backbone="transformer",
        layers="h",
        embedding="wte",
        transposed=True,
        kept=SavedActivations(inner=5),
        ignored=r"\.attn\.(masked_)?bias$",
    ),
    **dict.fromkeys(_STACKING, replace(_OTHER, experts=("gate_proj", "up_proj", "down_proj"))),
    **dict.fromkeys(
        ("minimax", "minimax_m2"),
        replace(_OTHER, experts=("w1", "w3", "w2"), moved=(("block_sparse_moe.", "mlp."),)),
    ),
    "gpt_neo": _DECODER_H,
    "gptj": _DECODER_H,
    "codegen": _DECODER_H,
    "gpt_bigcode": _DECODER_H,
    "openai-gpt": replace(_DECODER_H, defaults=_TIED, embedding="tokens_embed", transposed=True),
    "bloom": replace(_DECODER_H, embedding="word_embeddings"),
    "falcon": replace(_DECODER_H, embedding="word_embeddings"),
    "mpt": replace(_DECODER_H, layers="blocks"),
    "gpt_neox": replace(_OTHER, gated=False, backbone="gpt_neox", embedding="embed_in"),
    **dict.fromkeys(
        ("falcon_h1", "falcon_mamba", "mamba", "mamba2"),
        replace(_OTHER, unadapted=("out_proj", "conv1d")),
    ),
    "inkling_text": replace(_OTHER, logit_divisor="logits_mup_width_multiplier"),
    "minicpm3": replace(_OTHER, defaults={"dim_model_base": 256}, logit_width="dim_model_base"),
    "opt": replace(_OTHER, gated=False, backbone="model.decoder"),
    "phi": replace(_OTHER, gated=False),
    "recurrent_gemma": replace(
        _OTHER,
        defaults={**_TIED, "logits_soft_cap": 30.0},
        logit_cap="logits_soft_cap",
    ),
    "xlstm": replace(
        _OTHER,
        defaults={"output_logit_soft_cap": 30.0},
        logit_cap="output_logit_soft_cap",
    ),
}

for _kind, _why in REFUSED.items():
    FAMILIES[_kind] = replace(_OTHER, refused=_why)
for _kind, _parts in RENAMED.items():
    FAMILIES[_kind] = replace(_OTHER, renamed=_parts, gated=_kind != "nemotron_h")
for _kind, _why in FULL_REFUSED.items():
    FAMILIES[_kind] = replace(FAMILIES.get(_kind, _OTHER), full_refused=_why)

_INSIDE = {
    **dict.fromkeys(("emu3", "idefics2", "idefics3", "smolvlm"), "model.text_model"),
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo", "llama4", "nemotron_h_omni"),
        "language_model.model",
    ),
}
"""The module of the language model in classes that call it otherwise than most."""

BIASED_BY = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
"""The linears that have a bias if a key of config.json is true."""
ROPE_TYPES = ("default", "linear", "llama3")
"""The rotary embeddings that Motley computes; others are left to transformers."""
ACTIVATIONS = ("silu", "swish")
"""Two names of the function that Motley computes."""

_ROPE_KEYS = frozenset(
    (
        *("type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    )
)


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json; `where` names it in errors.

    Raises:
        InputError: it is no causal language model, or its weights are stored quantised.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(f"{where}: model_type must be a string, got {model_type!r}")
    family, text = known_family(config), text_config(config)
    if model_type not in FAMILIES and text is not config:
        inside = _INSIDE.get(model_type, "model.language_model")
        family = replace(known_family(text), code="transformers", inside=inside)
    if config.get("is_encoder_decoder") is True:
        raise InputError(
            f"{where}: {model_type} is an encoder with a decoder; what trains is a causal language"
            " model, a decoder alone"
        )
    if config.get("quantization_config") is not None:
        raise InputError(
            f"{where}: the model is stored quantised; use the original weights and set"
            " model.quantization instead"
        )
    return family


def known_family(config: Mapping[str, Any]) -> Family:
    """Return the row of a config.json without a check of it."""
    return FAMILIES.get(str(config.get("model_type")), _OTHER)


def biased_linears(family: Family, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the linears of a layer that have a bias."""
    by_keys = (BIASED_BY[key] for key in family.keys if key in BIASED_BY and config.get(key))
    return frozenset(family.biased or (linear for linears in by_keys for linear in linears))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    inside = config.get("text_config")
    return inside if isinstance(inside, Mapping) and "hidden_size" in inside else config


def apply_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json completed with what its class assumes."""
    return {**known_family(config).defaults, **config}


def explain_transformers_only(config: Mapping[str, Any], length: int | None = None) -> str | None:
    """Return why Motley's decoder and wgpu do not compute a model; None if they do.

    Args:
        config: config.json of a family that Motley trains.
        length: the most tokens of a row; None for all positions of the model.
    """
    family = known_family(config)
    if family.code != "motley":
        return f"layers of {config.get('model_type')} are computed by transformers' code alone"
    settings = apply_defaults(config)
    activation = settings.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        return f"hidden_act {activation!r} is computed by transformers' code alone"
    rope = rope_settings(settings)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ROPE_TYPES:
        return f"rope_type {kind!r} is computed by transformers' code alone"
    part = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if part not in (None, 1) or (other := rope.keys() - _ROPE_KEYS):
        key = "partial_rotary_factor" if part not in (None, 1) else min(other)
        return f"{key} of the rotary embedding is computed by transformers' code alone"
    window = _read_window(settings, family)
    limit = length or read_position_count(settings)
    if window is not None and (limit is None or limit > window):
        return (
            f"sliding_window {window} is shorter than a row of {limit or 'unknown length'}, and"
            " computed by transformers' code alone"
        )
    return None


@dataclass(frozen=True)
class Logits:
    """Settings of the logits: `cap tanh(x / divisor / cap)` of the product with the head."""

    divisor: float = 1.0
    cap: float | None = None
    """None bounds nothing."""


PLAIN = Logits()
"""The product is the logits."""


def logits_settings(config: Mapping[str, Any]) -> Logits:
    """Return what the class of a config.json makes of its head's product."""
    settings = apply_defaults(text_config(config))
    family = known_family(settings)
    divisor = settings.get(family.logit_divisor) or 1.0
    factor = settings.get(family.logit_factor) or 1.0
    if width := settings.get(family.logit_width):
        factor *= width / settings["hidden_size"]
    return Logits(divisor / factor, settings.get(family.logit_cap))


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding.

    transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    """
    return dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _read_window(settings: Mapping[str, Any], family: Family) -> int | None:
    """Return the tokens that the layers with a sliding window see; None if there are none."""
    used = family.has_windows and settings.get(
        "use_sliding_window", "use_sliding_window" not in family.keys
    )
    types = settings.get("layer_types")
    if types and "layer_types" in family.keys and "sliding_attention" not in types:
        return None
    window = settings.get("sliding_window")
    return window if used and type(window) is int else None
