"""Codecs: how a block of fp32 gradients travels as bytes, and the one that a run has agreed on.

A codec turns one whole block into bytes and back, and keeps nothing of it.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from trainer.config.codec import find_codec
from trainer.system.errors import InputError, ProtocolError
from trainer.system.passes import compiled_library

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """A way to write `[n]` fp32 values as bytes; `id` is its number on the wire."""

    id: int
    name: str

    def encoded_size(self, elements: int) -> int:
        """Return the encoded size of a block of so many elements."""
        ...

    def encode(self, values: Float32) -> Bytes:
        """Return the block as bytes; NaN and Inf stay NaN and Inf."""
        ...

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Write the decoded block into `out`."""
        ...


class Fp32:
    """Little-endian IEEE 754 binary32: exact."""

    id = 0
    name = "fp32"

    def encoded_size(self, elements: int) -> int:
        """Return 4 bytes an element."""
        return 4 * elements

    def encode(self, values: Float32) -> Bytes:
        """Return a copy of the bits."""
        return values.astype("<f4").view(np.uint8)

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Copy the bits, unless they are there."""
        if encoded.ctypes.data != out.ctypes.data:
            out[...] = encoded.view("<f4")


class Bf16:
    """bfloat16: the upper half of an fp32, rounded to nearest even."""

    id = 1
    name = "bf16"

    def encoded_size(self, elements: int) -> int:
        """Return 2 bytes an element."""
        return 2 * elements

    def encode(self, values: Float32) -> Bytes:
        """Return the rounded upper halves."""
        if compiled_library.PASSES:
            return compiled_library.PASSES.bf16_encode(values)
        with np.errstate(over="ignore", invalid="ignore"):  # the check of the gradient reports it
            return values.astype(bfloat16).view(np.uint8)

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Put the halves back on top of zeros."""
        out[...] = encoded.view(bfloat16)


class SenderCodec:
    """The codec of a run, of one that sends: each block by itself, and nothing of it later.

    A quantised codec is accompanied by bf16, in which a whole step may be sent.

    Args:
        codec: of every block.
        sizes: elements of each block.
    """

    has_feedback = False
    """Whether what is dropped of a block is sent with a later one."""

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self.codec = codec
        self._sizes = sizes
        self._plain = Bf16() if find_codec(codec.name).is_quantized else codec

    @property
    def is_quantized(self) -> bool:
        """Whether blocks are encoded late, when they are sent, as that takes time."""
        return self._plain is not self.codec

    def find_codec(self, number: int, *, in_bf16: bool = False) -> Codec:
        """Return the codec with a number on the wire.

        Args:
            in_bf16: of a step whose blocks come in bf16 alone.

        Raises:
            ProtocolError: a block may not come in it.
        """
        if number == self._plain.id:
            return self._plain
        if number != self.codec.id:
            raise ProtocolError(f"received codec {number}, expected {self.codec.name}")
        if in_bf16:
            raise ProtocolError(f"{self.codec.name} received in a step of bf16")
        return self.codec

    def encode(
        self, block: int, values: Float32, *, in_bf16: bool = False, batch: int = 0
    ) -> tuple[Codec, Bytes]:
        """Return the bytes for a block, and the codec that they are in.

        A quantised one gives way to bf16 if the block holds a NaN or Inf, or squares that
        overflow, which so reach the check that names their tensor.

        Args:
            values: `[n]` fp32; unchanged.
            in_bf16: send no quantised block.
            batch: samples of this step over all workers, for a codec that keeps residuals.
        """
        del block, batch
        codec = self._choose_codec(values, in_bf16)
        return codec, codec.encode(values)

    def compute_largest_sizes(self) -> tuple[int, ...]:
        """Return the most bytes that each encoded block can take."""
        either = (self.codec, self._plain)
        return tuple(max(codec.encoded_size(size) for codec in either) for size in self._sizes)

    @property
    def norm(self) -> float:
        """The L2 norm of what has not been sent: the loss if this sender is lost now."""
        return self.compute_norm(range(len(self._sizes)))

    def compute_norm(self, blocks: Iterable[int]) -> float:
        """Return the L2 norm of what has not been sent of some blocks."""
        del blocks
        return 0.0

    def clear_residuals(self) -> None:
        """Forget what has not been sent, as a sender that has just joined."""

    def _choose_codec(self, values: Float32, in_bf16: bool) -> Codec:
        if in_bf16 or not self.is_quantized:
            return self._plain
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = math.isfinite(np.dot(values, values))
        return self.codec if is_finite else self._plain


def make_codec(name: str) -> Codec:
    """Return a codec by its name; of `auto`, the last that it takes.

    Raises:
        InputError: there is no such codec.
    """
    try:
        made_by = find_codec(name).made_by
    except ValueError as error:
        raise InputError(str(error)) from None
    made: Codec = pkgutil.resolve_name(f"trainer.exchange.protocol.{made_by}")()
    return made
