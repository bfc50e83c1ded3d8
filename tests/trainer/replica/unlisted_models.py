"""Small models of families that the table does not list, and of those that see or hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

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
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
    },
    "inkling_text": {"tie_word_embeddings": False},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "use_mamba_kernels": False,
    },
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
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
        },
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
SEES: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "mlp_layer_types": ["dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "downsample_hidden_size": 16,
            "feature_size": 16,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
    },
    "emu3": {
        "vq_config": {
            "base_channels": 32,
            "codebook_size": 32,
            "embed_dim": 8,
            "latent_channels": 8,
            "num_res_blocks": 1,
            "channel_multiplier": [1, 1],
            "attn_resolutions": [],
        },
        "vocabulary_map": {
            "<image>": 290,
            "<|extra_200|>": 291,
            **{f"<|visual token {place:06d}|>": 200 + place for place in range(32)},
        },
    },
    **{key: {} for key in ("fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "llama4")},
    **{key: {} for key in ("mllama", "moss_transcribe_diarize", "qwen4_exp", "smolvlm")},
}
"""Models that see or hear, whose language model trains (`test_models_that_see.py`)."""


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


def write_whole(folder: Path, model_type: str) -> Path:
    """Write a model that sees or hears, its parts as small as their classes allow."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    parts = {key: getattr(kind(), key) for key in kind.sub_configs}
    own = SEES[model_type]
    small = {
        key: type(part)(**_small(part))
        for key, part in parts.items()
        if part is not None and key not in own
    }
    tree = kind(**{**small, **own})
    torch.manual_seed(1)
    model: Any = whole_class(tree)._from_config(tree)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "head" not in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.1)
    model.save_pretrained(folder)
    return folder


def whole_class(tree: Any) -> Any:
    """Return the class of a config with all its parts."""
    autos: tuple[Any, ...] = (
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForMultimodalLM,
        transformers.AutoModelForCausalLM,
    )
    return next(
        auto._model_mapping[type(tree)] for auto in autos if type(tree) in auto._model_mapping
    )


def _small(part: Any) -> dict[str, Any]:
    sizes = {**SIZES, "image_size": 28, "patch_size": 14, "depth": 2}
    found = {key: value for key, value in sizes.items() if key in vars(part)}
    return {**found, **OWN.get(part.model_type, {})}
