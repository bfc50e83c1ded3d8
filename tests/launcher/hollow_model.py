"""A Qwen3 by its headers alone: where its weights would be, the file is a hole."""

import json
import struct
from pathlib import Path


def make_model(folder: Path, hidden: int = 2560, vocabulary: int = 151936, layers: int = 4) -> Path:
    """Make a Qwen3 of real size by its headers alone; where weights would be the file is a hole."""
    inner, heads = 4 * hidden, hidden // 80
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": [128 * heads, hidden],
            f"{prefix}self_attn.k_proj.weight": [1024, hidden],
            f"{prefix}self_attn.v_proj.weight": [1024, hidden],
            f"{prefix}self_attn.o_proj.weight": [hidden, 128 * heads],
            f"{prefix}self_attn.q_norm.weight": [128],
            f"{prefix}self_attn.k_norm.weight": [128],
            f"{prefix}mlp.gate_proj.weight": [inner, hidden],
            f"{prefix}mlp.up_proj.weight": [inner, hidden],
            f"{prefix}mlp.down_proj.weight": [hidden, inner],
            f"{prefix}input_layernorm.weight": [hidden],
            f"{prefix}post_attention_layernorm.weight": [hidden],
        }
    shapes["model.norm.weight"] = [hidden]
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
