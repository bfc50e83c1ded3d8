"""Initial weights, the same on every machine: what a run trains, or all of a new model.

Drawn in NumPy, those of a run by its coordinator, never by a backend. Only the integers of Philox
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) are random, and they reach fp32
by exact and correctly rounded operations; NumPy's normal generator would call libm in its tails.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.run import RunConfig
from trainer.model.architecture import parse_architecture
from trainer.model.layout import MAGNITUDE, SIDE_A, GradientLayout, TensorSlot, stored_name
from trainer.model.safetensors_headers import TensorHeader, read_headers

WEIGHT_STD = 0.02
"""Standard deviation of new weights, as transformers' `initializer_range`."""


def initial_weights(layout: GradientLayout, model_dir: Path, config: RunConfig) -> np.ndarray:
    """Return the flat fp32 vector `[layout.size]` of step 0."""
    headers = read_headers(model_dir)
    flat = np.empty(layout.size, dtype=np.float32)
    for slot in layout.iter_tensors():
        flat[slot.start : slot.stop] = initial_tensor(headers, config.training.seed, slot)
    return flat


def initial_tensor(headers: Mapping[str, TensorHeader], seed: int, slot: TensorSlot) -> np.ndarray:
    """Return one tensor of it, fp32 `[slot.size]`.

    LoRA: A is U(-1/sqrt(in), 1/sqrt(in)) as in PEFT, B is zero, DoRA's magnitudes are the norms of
    the base's rows. Everything that the model directory stores is read from it; a missing head is
    uniform with `WEIGHT_STD`.

    Args:
        headers: of the model directory.
    """
    stored = stored_name(headers, slot.stored or slot.name)
    if stored is not None:
        return read_tensor(headers[stored]).reshape(-1)
    if slot.name.endswith(".lora_B.weight"):
        return np.zeros(slot.size, np.float32)
    if slot.name.endswith(MAGNITUDE):
        base = stored_name(headers, f"{slot.name.removesuffix(MAGNITUDE)}.weight")
        assert base is not None, slot.name
        return np.linalg.norm(read_tensor(headers[base]), axis=1)
    bound = WEIGHT_STD * math.sqrt(3.0)
    if slot.name.endswith(SIDE_A):
        bound = 1.0 / math.sqrt(slot.shape[1])
    return draw_uniform(seed, slot.name, slot.size, bound)


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return every tensor by name: norms one, biases zero, the rest uniform as in transformers.

    Weights that write into the residual stream are scaled down by the depth, as in GPT-2.
    """
    model = parse_architecture(config, "config.json")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, model.hidden_size)
    }
    for layer in range(model.num_layers):
        for name, shape in model.layer_tensors():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, dtype=np.float32)
            continue
        if name.endswith(".bias"):
            weights[name] = np.zeros(shape, dtype=np.float32)
            continue
        bound = WEIGHT_STD * math.sqrt(3.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            bound /= math.sqrt(2.0 * model.num_layers)
        weights[name] = draw_uniform(seed, name, math.prod(shape), bound).reshape(shape)
    return weights


def draw_uniform(seed: int, name: str, size: int, bound: float) -> np.ndarray:
    """Return fp32 `[size]` of U(-bound, bound), a separate stream for each seed and name."""
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    integers = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size)
    # An fp32 mantissa holds 24 bits, so the conversion is exact.
    unit = (integers >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23)
    return (unit - np.float32(1.0)) * np.float32(bound)


def is_untrained(model_dir: Path) -> bool:
    """Whether a model's weights are as they were drawn: its last norm is nothing but ones."""
    norms = [
        header
        for name, header in read_headers(model_dir).items()
        if name.endswith(("norm.weight", "ln_f.weight")) and not re.search(r"\.\d+\.", name)
    ]
    # Gemma's norms add one to what is stored.
    return bool(norms) and all(
        any((read_tensor(header) == drawn).all() for drawn in (0.0, 1.0)) for header in norms
    )


def read_tensor(header: TensorHeader) -> np.ndarray:
    """Return a stored F32, F16 or BF16 tensor as fp32 in its shape."""
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[header.dtype]
    count = math.prod(header.shape)
    raw = np.fromfile(header.file, dtype=dtype, count=count, offset=header.begin)
    if header.dtype == "BF16":
        raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32, copy=False).reshape(header.shape)
