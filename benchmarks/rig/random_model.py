"""Model folders of random weights and given sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.model.architecture import parse_architecture

Dtype = Literal["BF16", "F32"]
_BITS: dict[Dtype, tuple[int, int]] = {
    "BF16": (0x80FF_80FF_80FF_80FF, 0x3C00_3C00_3C00_3C00),
    "F32": (0x80FF_FFFF_80FF_FFFF, 0x3C00_0000_3C00_0000),
}
"""Bits of 64 random ones that stay (sign, mantissa, the last of the exponent), and the rest of the
exponent. Values are from 2^-7 to 2^-5, of either sign, with a root mean square of 0.019."""
_ONE: dict[Dtype, bytes] = {"BF16": b"\x80\x3f", "F32": b"\0\0\x80\x3f"}
_DRAWN = 1 << 22
"""Numbers of 64 bits that are drawn at once."""


def write_model(folder: Path, tree: dict[str, Any], dtype: Dtype = "BF16") -> Path:
    """Write a model folder of random weights at about the speed of the disk, and return it.

    The bits are drawn, not the numbers: 8 GB take seconds. Norms are ones.

    Args:
        tree: its config.json; embeddings are tied.
    """
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    shapes = dict(tensors(tree))
    size = len(_ONE[dtype])
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                file.write(_ONE[dtype] * math.prod(shape))
                continue
            for part in _random_bytes(generator, size * math.prod(shape), *_BITS[dtype]):
                file.write(part)
    return folder


def _random_bytes(
    generator: np.random.Generator, size: int, kept: int, exponents: int
) -> Iterator[bytes]:
    """Yield so many bytes of random numbers."""
    while size > 0:
        bits = generator.integers(0, 1 << 64, min(_DRAWN, -(-size // 8)), np.uint64)
        bits &= np.uint64(kept)
        bits |= np.uint64(exponents)
        yield bits.astype("<u8", copy=False).tobytes()[:size]
        size -= bits.nbytes


def tensors(tree: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a model with tied embeddings."""
    model = parse_architecture(tree, "config.json")
    yield "model.embed_tokens.weight", (model.vocab_size, model.hidden_size)
    for layer in range(model.num_layers):
        for name, shape in model.layer_tensors():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (model.hidden_size,)
