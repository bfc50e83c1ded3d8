"""What a small model of each family needs beside the sizes that all have: one row a family."""

from __future__ import annotations

from typing import Any

from trainer.model import families

_WINDOW = {"sliding_window": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_HALVES = {"head_dim": None}
_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_SHARED = {**_ROUTED, "shared_expert_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": _HALVES,
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "gemma": {},
    "gemma2": {**_WINDOW, "final_logit_softcapping": 0.5},
    "gemma3_text": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {**_HALVES, "pad_token_id": 0, "resid_pdrop": 0.1, "eos_token_id": 2},
    "olmo2": {"pad_token_id": None, "eos_token_id": 2, **_HALVES},
    "olmo3": {
        **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "eos_token_id": 2,
    },
    "ministral3": {},
    "glm4": {"pad_token_id": 0, "eos_token_id": 2},
    "cohere2": {
        **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.3,
        "eos_token_id": 2,
        **_HALVES,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], **_HALVES},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
        "attention_dropout": 0.1,
        **_HALVES,
    },
    "mixtral": {**_EXPERTS, "router_jitter_noise": 0.1},
    "qwen3_moe": _ROUTED,
    "qwen3_next": {**_SHARED, **_STATES},
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": {**_SHARED, **_STATES},
    "gpt_oss": {**_EXPERTS, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_positions": 512, "bos_token_id": 2, "eos_token_id": 2, "n_inner": 128, **_HALVES},
}
TEACHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_SHARED, **_HALVES},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        **_HALVES,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
"""Families that only a teacher may be of: mixtures of experts, some with recurrent layers."""
COMPUTED_HERE = tuple(name for name, row in families.FAMILIES.items() if row.code == "motley")
"""Whose layers Motley's own decoder and wgpu compute."""
