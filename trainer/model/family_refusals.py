"""Families that train in part or not at all, and why: a row of `families` each.

These are facts of classes of transformers, so that they are known before a model is loaded. What a
class of another version does otherwise, its check after loading finds (`replica.torch.unlisted`).
"""

from __future__ import annotations

REFUSED = {
    **dict.fromkeys(
        (
            *("bert", "big_bird", "bert-generation", "biogpt", "camembert", "data2vec-text"),
            *("electra", "ernie", "gpt_neox_japanese", "megatron-bert", "modernbert-decoder"),
            *("reformer", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
            *("whisper", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
        ),
        "its logits are not made by a linear lm_head on its hidden states, and no other head is"
        " trained here",
    ),
    "blt": "it reads bytes in patches that a second model in it chooses, and has no one list of"
    " layers",
    "deepseek_v4": "transformers renames its linears when it loads them, so that no adapter of"
    " the class has the name of one of its files",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts tokens from the hidden states of another model, and computes nothing alone",
    ),
    "git": "it has two lists of layers, of a text and of pictures, and its logits are not made by"
    " a linear lm_head",
    "prophetnet": "its logits are those of streams that it keeps for each of the next tokens, not"
    " of its last hidden states",
}
"""Why no model of these types trains, whatever its sizes."""

RENAMED = {
    "axk2": ("W_down", "W_up", "q_b_proj"),
    "bailing_hybrid": ("attention",),
    "hy_v3": ("shared_mlp",),
    "hy_v4": ("linear_gate",),
    "kimi_linear": ("block_sparse_moe", "f_a_proj", "f_b_proj", "shared_experts"),
    "laguna": ("shared_expert",),
    "nemotron_h": ("mixer",),
}
"""Parts of the names of linears that transformers renames when it loads models of these types."""

FULL_REFUSED = {
    **dict.fromkeys(
        (
            *("apertus", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "gemma4_text"),
            *("gemma4_unified_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "inkling_text"),
            *("longcat_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "phi4_multimodal"),
            *("solar_open", "zaya"),
        ),
        "its files hold buffers that its class does not train",
    ),
    **dict.fromkeys(
        (
            *("aria_text", "axk1", "bigbird_pegasus", "ctrl", "dots3_note_text", "ernie4_5_moe"),
            *("flint", "granitemoe", "granitemoehybrid", "granitemoeshared", "jamba", "kolibri1"),
            *("mimo_v2_flash", "olmo_hybrid", "phimoe", "qwen4_exp_text"),
        ),
        "its class keeps weights in another form than its files",
    ),
}
"""Why models of these types train by adapters alone."""
INSEPARABLE = (
    *("bamba", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    *("glm_moe_dsa", "hy_v4", "xlstm", "zaya"),
)
"""Types whose layers pass more than hidden states on, such as keys and values of another layer:
they run no groups of micro-batches (`replica/torch/published_parts.py`)."""
