"""What a small model of each family needs beside the sizes that all have: one row a family."""

from __future__ import annotations

from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}
COMPUTED_HERE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Whose layers Motley's own decoder and wgpu compute."""
