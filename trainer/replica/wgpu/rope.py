"""Rotary position embedding: the tables that kernels read (Su et al., arXiv 2104.09864).

Angles are rounded as transformers rounds them (fp32 frequencies times fp32 positions), so that
long sequences agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import InputError

_THETA = 10_000.0
_SUPPORTED = ("default", "linear", "llama3")


def rope_tables(
    config: Mapping[str, Any], head_dim: int, length: int, where: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines, fp32 `[length, head_dim / 2]`, for positions 0 to length - 1.

    `config` is the model's config.json; `where` names it in errors.

    Raises:
        InputError: a scaling that the engine does not compute.
    """
    frequencies = _frequencies(config, head_dim, where)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def _frequencies(config: Mapping[str, Any], head_dim: int, where: str) -> NDArray[np.float32]:
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _SUPPORTED or settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"{where}: rope_type {kind!r} is not computed by the wgpu engine (supported:"
            f" {', '.join(_SUPPORTED)}, over the whole head); use --gpu-backend cpu or cuda"
        )
    theta = float(settings.get("rope_theta", config.get("rope_theta") or _THETA))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    try:
        if kind == "linear":
            return frequencies / np.float32(settings["factor"])
        if kind == "llama3":
            return _llama3(frequencies, settings)
    except KeyError as error:
        raise InputError(f"{where}: rope_type {kind} needs {error.args[0]}") from None
    return frequencies


def _llama3(frequencies: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Stretch low frequencies, keep high ones and blend between (Llama 3.1, as transformers)."""
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    context = float(settings["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = np.where(wavelengths > context / low, frequencies / factor, blended)
    return np.where(wavelengths < context / high, frequencies, stretched).astype(np.float32)
