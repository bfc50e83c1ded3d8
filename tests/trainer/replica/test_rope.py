"""Rotary tables against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from trainer.replica.rope import compute_rope_tables
from trainer.system.errors import InputError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default", "rope_theta": 1_000_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        LLAMA3,
    ],
    ids=lambda settings: settings["rope_type"],
)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_tables_are_those_of_transformers(settings: dict[str, Any], head_dim: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters=settings,
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    mine = compute_rope_tables({"rope_parameters": settings}, head_dim, 512, "config.json")
    # Powers differ in their last bit between libraries; a position multiplies that.
    bounds = np.arange(1, 513)[:, None] * 2.0**-23
    for table, expected in zip(mine, theirs, strict=True):
        assert (np.abs(table - expected[0, :, : head_dim // 2].numpy()) < bounds).all()


def test_old_names_of_the_settings_are_read() -> None:
    """Configs from before transformers 5."""
    scaling = {
        key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")
    }
    old = {"rope_theta": 500_000.0, "rope_scaling": {**scaling, "type": "llama3"}}
    for mine, theirs in zip(
        compute_rope_tables(old, 64, 128, ""),
        compute_rope_tables({"rope_parameters": LLAMA3}, 64, 128, ""),
        strict=True,
    ):
        assert np.array_equal(mine, theirs)


def test_a_scaling_that_lacks_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"config\.json: rope_type linear needs factor"):
        compute_rope_tables({"rope_parameters": {"rope_type": "linear"}}, 64, 8, "config.json")
