"""Rotary position embedding: its frequencies and tables (Su et al., arXiv 2104.09864).

All backends take the same frequencies from here. Angles are rounded as transformers rounds them
(fp32 frequencies times fp32 positions), so that long sequences agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.model.families import ROPE_TYPES, apply_defaults, rope_settings
from trainer.system.errors import InputError

_THETA = 10_000.0


def compute_rope_tables(
    config: Mapping[str, Any], head_dim: int, length: int, where: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines, fp32 `[length, head_dim / 2]`, for positions 0 to length - 1.

    `config` is the model's config.json; `where` names it in errors.

    Raises:
        InputError: the scaling lacks a number.
    """
    angles = np.arange(length, dtype=np.float32)[:, None] * compute_rope_frequencies(
        config, head_dim, where
    )
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def compute_rope_frequencies(
    config: Mapping[str, Any], head_dim: int, where: str
) -> NDArray[np.float32]:
    """Return the radians by which each pair of a head turns per position, fp32 `[head_dim / 2]`.

    Raises:
        InputError: the scaling lacks a number.
    """
    config = apply_defaults(config)
    settings = rope_settings(config)
    kind = settings.get("rope_type", settings.get("type", "default"))
    assert kind in ROPE_TYPES, f"{where}: left to transformers"
    theta = float(settings.get("rope_theta", config.get("rope_theta") or _THETA))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    turns = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    try:
        if kind == "linear":
            return turns / np.float32(settings["factor"])
        if kind == "llama3":
            return _scale_llama3(turns, settings)
    except KeyError as error:
        raise InputError(f"{where}: rope_type {kind} needs {error.args[0]}") from None
    return turns


def _scale_llama3(turns: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Stretch low frequencies, keep high ones and blend between (Llama 3.1, as transformers)."""
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    context = float(settings["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / turns
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * turns / factor + blend * turns
    stretched = np.where(wavelengths > context / low, turns / factor, blended)
    return np.where(wavelengths < context / high, turns, stretched).astype(np.float32)
