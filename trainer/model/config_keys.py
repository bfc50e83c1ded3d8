"""Handling of each key of config.json: used, refused by its name, or named (F-IN-001)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.model.families import BIASES, WINDOWS, apply_defaults, find_family, text_config
from trainer.model.safetensors_headers import INDEX_FILE, SINGLE_FILE, read_config, read_headers
from trainer.model.tensor_names import other_parts
from trainer.system.errors import InputError
from trainer.system.key_table import KeyTable, UnknownKeys

_OF_SOME = frozenset((*BIASES, *WINDOWS, "no_rope_layers", "no_rope_layer_interval"))
"""Keys that `Family.keys` names where a family has them."""
_OTHER_MODELS = (
    "changes what other families compute, and no model of this type has it;"
    " correct model_type, or remove the key"
)
CONFIG_KEYS = KeyTable(
    what="config.json",
    used=frozenset(
        (
            *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size"),
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias"),
            *("mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
            *("partial_rotary_factor", "original_max_position_embeddings"),
            *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
            *("no_rope_layers", "no_rope_layer_interval", "quantization_config", "id2label"),
            *("label2id", "num_labels", "pad_token_id", "bos_token_id", "eos_token_id"),
            *("attention_dropout", "attn_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
        )
    ),
    harmless=frozenset(
        (
            *("use_cache", "initializer_range", "torch_dtype", "dtype", "transformers_version"),
            *("pretraining_tp", "_name_or_path", "name_or_path", "return_dict", "problem_type"),
            *("output_attentions", "output_hidden_states", "_attn_implementation"),
            *("attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward"),
            *("is_encoder_decoder", "is_decoder", "add_cross_attention", "torchscript"),
            *("tokenizer_class", "task_specific_params", "is_llama_config", "unsloth_version"),
            *("unsloth_fixed", "transformers.js_config", "model_name", "sep_token_id"),
            *("decoder_start_token_id", "finetuning_task", "prefix", "pruned_heads"),
            *("cross_attention_hidden_size", "tie_encoder_decoder", "use_bfloat16", "max_length"),
            *("temperature", "top_k", "top_p", "do_sample", "num_beams", "repetition_penalty"),
        )
    ),
    refused=dict.fromkeys(
        (
            *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
            *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
            *("logits_scaling", "logit_scale", "scale_emb", "scale_depth", "dim_model_base"),
            *("clip_qkv", "qk_layernorm", "use_qk_norm", "rope_interleaved", "rotary_pct"),
            *("num_experts", "num_local_experts", "n_routed_experts", "parallel_attn"),
            *("use_bidirectional_attention", "attention_chunk_size", "swiglu_limit"),
            *("attn_temperature_tuning", "layer_norm_type", "compression_config"),
        ),
        _OTHER_MODELS,
    ),
)
"""Support of each key by Motley's own decoder. Models of transformers' code are transformers'."""

_FACTORS = frozenset(
    (
        *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
        *("rotary_pct", "scale_emb"),
    )
)
"""Keys whose value 1 changes nothing."""


def check_keys(config: Mapping[str, Any], where: str) -> None:
    """Refuse keys that would change the computation of Motley's decoder and have no effect.

    Raises:
        InputError: names the key and what to do.
    """
    family = find_family(config, where)
    if family.code != "motley":
        return
    asked = [key for key, value in config.items() if not _is_neutral(key, value)]
    refusal = CONFIG_KEYS.explain_refusal(asked)
    if refusal is None and (foreign := [key for key in asked if key in _OF_SOME - {*family.keys}]):
        refusal = f"'{foreign[0]}' {_OTHER_MODELS}"
    other = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if other:
        refusal = f"'layer_types' has {sorted(map(str, other))[0]!r}, which is not computed"
    if refusal is not None:
        raise InputError(f"{where}: {refusal}")


def list_notices(model_dir: Path) -> Iterator[str]:
    """Yield what a model's folder has and training does not use, in lines for people."""
    if all((model_dir / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        yield f"{INDEX_FILE} and its files are not used: {SINGLE_FILE} is there, too"
    tree = read_config(model_dir)
    family, headers, config = (
        find_family(tree, str(model_dir)),
        read_headers(model_dir),
        text_config(tree),
    )
    if family.inside and (parts := other_parts(headers)):
        yield f"{', '.join(parts)} of the weights: not used, the language model alone trains"
    for key, value in config.items():
        if is_dropout(key) and isinstance(value, int | float) and value:
            yield f"config.json: {key} {value} is not applied: training has no dropout"
    if apply_defaults(config).get("tie_word_embeddings") and "lm_head.weight" in headers:
        yield "lm_head.weight is not used: by config.json the embedding is the head too"
    if family.code == "motley":
        unknown = UnknownKeys(CONFIG_KEYS)
        unknown.add(config)
        if (line := unknown.report()) is not None:
            yield line


def is_dropout(key: str) -> bool:
    """Return whether a key of config.json makes activations random."""
    return key.endswith(("dropout", "dropout_prob", "_pdrop", "layerdrop", "jitter_noise"))


def _is_neutral(key: str, value: object) -> bool:
    """Return whether a key with this value changes nothing."""
    return value in (None, False, 0) or (key in _FACTORS and value == 1)
