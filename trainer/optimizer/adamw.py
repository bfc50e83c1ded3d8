"""Deterministic AdamW over flat fp32 NumPy vectors, and the state that it moves.

Every member of a run applies the same averaged gradient and must end with the same bits
(F-DP-001), whatever CPU it has. So the update is written in separate NumPy ufuncs: IEEE 754 rounds
+, -, *, / and sqrt correctly everywhere, while fused operations, BLAS and reductions depend on the
CPU. What needs a reduction (the clip scale) or libm (the learning rate) is computed once, by the
coordinator, and reaches `apply` as a number.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from blake3 import blake3

from trainer.system.passes import compiled_library

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainer.config.optimizer import OptimizerConfig
    from trainer.model.layout import GradientLayout, TensorSlot

    Flat = NDArray[np.float32]

CHUNK = 64 * 1024
"""Floats handled at a time: the six arrays of 256 KiB that an update touches stay in the cache."""
_CHUNK_SQUARED = 8 * 1024
"""Floats squared at a time: their doubles stay in the cache, and BLAS adds them in one thread."""


Vector = Literal["weights", "first_moment", "second_moment"]
VECTORS: tuple[Vector, ...] = ("weights", "first_moment", "second_moment")
"""In the order in which they are read."""


class Gradient(Protocol):
    """The gradient of an update: fp32 [N], a flat array or a chunked one."""

    @property
    def size(self) -> int:
        """N."""
        ...

    def __getitem__(self, span: slice, /) -> Flat:
        """Return a range of it."""
        ...


class SavedState(Protocol):
    """The source of a checkpoint: a `Snapshot`, or a state that arrives while it is written."""

    step: int

    @property
    def digest(self) -> str | None:
        """`weights_digest` of the weights; None if they are not there yet."""
        ...

    def iter_chunks(self, vector: Vector) -> Iterator[Flat]:
        """Yield a vector in consecutive chunks; weights first, then both moments, each once."""
        ...

    def close(self) -> None:
        """Release all arrays: nothing more is read."""
        ...


class Snapshot:
    """A state as it was at one step, for a slow reader: a checkpoint writer, a joining worker.

    The arrays, fp32 [N] each, are read-only and never change. They are shared with the running
    state until it moves: the next `AdamW.apply` works on a copy of each that is still held here.
    Hold the Snapshot itself, not only its arrays, while reading, and `release` each vector as soon
    as its bytes are elsewhere: a copy costs a gradient of memory.
    """

    def __init__(self, weights: Flat, first_moment: Flat, second_moment: Flat, step: int) -> None:
        self._arrays: dict[Vector, Flat] = {
            "weights": _read_only(weights),
            "first_moment": _read_only(first_moment),
            "second_moment": _read_only(second_moment),
        }
        self.step = step

    @property
    def weights(self) -> Flat:
        """The trainable weights, [N]."""
        return self._get_vector("weights")

    @property
    def first_moment(self) -> Flat:
        """The running mean of the gradient, [N]."""
        return self._get_vector("first_moment")

    @property
    def second_moment(self) -> Flat:
        """The running mean of the squared gradient, [N]."""
        return self._get_vector("second_moment")

    @property
    def is_closed(self) -> bool:
        """Whether all arrays were released."""
        return not self._arrays

    @property
    def digest(self) -> str:
        """`weights_digest` of the weights."""
        return weights_digest(self.weights)

    def has_vector(self, vector: Vector) -> bool:
        """Return whether a vector is still to be read."""
        return vector in self._arrays

    def iter_chunks(self, vector: Vector) -> Iterator[Flat]:
        """Yield a vector as one chunk, and release it when the next one is requested."""
        yield self._get_vector(vector)
        self.release(vector)

    def release(self, vector: Vector) -> None:
        """Release a vector; reading it through this snapshot is an error from now on."""
        self._arrays.pop(vector, None)

    def close(self) -> None:
        """Release all arrays."""
        self._arrays.clear()

    def _get_vector(self, vector: Vector) -> Flat:
        assert vector in self._arrays, f"the snapshot was closed, or {vector} released"
        return self._arrays[vector]


@dataclass(eq=False)
class TrainState:
    """The state that training changes: fp32 [N] each, and `step`, the number of applied updates.

    One thread moves the state and takes its snapshots; any thread may read those.
    """

    weights: Flat
    first_moment: Flat
    second_moment: Flat
    step: int = 0

    def __post_init__(self) -> None:
        self.whole = True
        """False if an update was interrupted."""
        self._readers: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        for array in (self.weights, self.first_moment, self.second_moment):
            assert array.dtype == np.float32, array.dtype
            assert array.shape == (self.weights.size,), array.shape

    @classmethod
    def create(cls, weights: Flat) -> TrainState:
        """Return the state before the first update; it takes `weights` over."""
        return cls(weights, np.zeros_like(weights), np.zeros_like(weights), step=0)

    def take_snapshot(self) -> Snapshot:
        """Return an immutable view of this state; nothing is copied unless the state moves on."""
        assert self.whole, f"update {self.step} broke off in the middle: the state is neither"
        snapshot = Snapshot(self.weights, self.first_moment, self.second_moment, self.step)
        self._readers.add(snapshot)
        return snapshot

    def compute_digest(self) -> str:
        """Return the BLAKE3 hex digest of weights, both moments and the step."""
        hasher = blake3()
        for array in (self.weights, self.first_moment, self.second_moment):
            hasher.update(_little_endian(array))
        return hasher.update(struct.pack("<Q", self.step)).hexdigest()

    def detach_snapshots(self) -> None:
        """Move to private copies of the arrays that a live snapshot still holds."""
        for vector in VECTORS:
            if any(reader.has_vector(vector) for reader in self._readers):
                setattr(self, vector, getattr(self, vector).copy())
        self._readers.clear()


class AdamW:
    """AdamW (arXiv:1711.05101, algorithm 2) on the flat vector of one layout.

    Weight decay is decoupled and falls on tensors with two or more dimensions only: matrices decay,
    norms and biases do not.
    """

    def __init__(self, settings: OptimizerConfig, layout: GradientLayout) -> None:
        self.settings = settings
        self.size = layout.size
        self._spans = tuple(_iter_spans(layout))
        width = min(CHUNK, layout.size)
        self._a = np.empty(width, dtype=np.float32)
        self._b = np.empty(width, dtype=np.float32)

    def clip_scale(self, norm: float) -> float:
        """Return the factor that makes a gradient of this norm short enough."""
        limit = self.settings.max_grad_norm
        return 1.0 if norm <= limit else limit / norm

    def apply(
        self,
        state: TrainState,
        gradient: Gradient,
        learning_rate: float,
        scale: float,
        restarted: int = 0,
    ) -> None:
        """Move `state` by one update with `gradient` * `scale`; the gradient is not changed.

        Args:
            state: moved in place, or onto fresh arrays while a snapshot of it is alive.
            gradient: the averaged gradient, fp32 [N], finite.
            learning_rate: of this update.
            scale: the clip factor, 1 when the gradient is short enough.
            restarted: the step at which the first moment was zero; its bias counts from there.
        """
        assert (gradient.size,) == state.weights.shape == (self.size,), gradient.size
        state.detach_snapshots()
        state.whole = False
        state.step += 1
        # Scalars are computed in double and rounded to fp32 once. `**` of a double is the same on
        # every CPU only if its libm is: beta**t by repeated multiplication needs no libm.
        settings = self.settings
        beta1, beta2 = np.float32(settings.beta1), np.float32(settings.beta2)
        rest1, rest2 = np.float32(1 - settings.beta1), np.float32(1 - settings.beta2)
        step_size = np.float32(
            learning_rate / (1 - compute_power(settings.beta1, state.step - restarted))
        )
        correction = np.float32(math.sqrt(1 - compute_power(settings.beta2, state.step)))
        epsilon = np.float32(settings.epsilon)
        decay = np.float32(1 - learning_rate * settings.weight_decay)
        clip = np.float32(scale)

        for start, stop, decays in self._spans:
            weights = state.weights[start:stop]
            mean = state.first_moment[start:stop]
            square = state.second_moment[start:stop]
            part = gradient[start:stop]
            assert part.dtype == np.float32, part.dtype
            if compiled_library.PASSES:
                vectors, moments = (weights, part, mean, square), (beta1, rest1, beta2, rest2)
                kept = decay if decays else np.float32(1)
                compiled_library.PASSES.adamw(
                    vectors, clip, moments, kept, step_size, correction, epsilon
                )
                continue

            a, b = self._a[: stop - start], self._b[: stop - start]
            np.multiply(part, clip, out=a)
            np.multiply(mean, beta1, out=mean)
            np.multiply(a, rest1, out=b)
            np.add(mean, b, out=mean)
            np.multiply(a, a, out=a)
            np.multiply(a, rest2, out=a)
            np.multiply(square, beta2, out=square)
            np.add(square, a, out=square)

            np.sqrt(square, out=a)
            np.divide(a, correction, out=a)
            np.add(a, epsilon, out=a)
            np.divide(mean, a, out=b)
            np.multiply(b, step_size, out=b)
            if decays and settings.weight_decay:
                np.multiply(weights, decay, out=weights)
            np.subtract(weights, b, out=weights)
        state.whole = True


def square_sum(values: Flat) -> float:
    """Return the sum of squares in double precision, chunk by chunk to save memory."""
    if compiled_library.PASSES:
        return compiled_library.PASSES.square_sum(values)
    starts = range(0, values.size, _CHUNK_SQUARED)
    chunks = (values[start : start + _CHUNK_SQUARED].astype(np.float64) for start in starts)
    return math.fsum(float(np.dot(chunk, chunk)) for chunk in chunks)


def weights_digest(flat: Flat) -> str:
    """Return the BLAKE3 hex digest over the little-endian fp32 bytes of `flat`."""
    return blake3(_little_endian(flat)).hexdigest()


def compute_power(base: float, exponent: int) -> float:
    """Return base**exponent by squaring: only multiplications, the same bits on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _iter_spans(layout: GradientLayout) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, whether it decays), a chunk at most; a gradient may lie in blocks."""
    for block in layout.blocks:
        for decays, neighbours in groupby(block.tensors, key=_is_matrix):
            slots = tuple(neighbours)
            for start in range(slots[0].start, slots[-1].stop, CHUNK):
                yield start, min(start + CHUNK, slots[-1].stop), decays


def _is_matrix(slot: TensorSlot) -> bool:
    return len(slot.shape) >= 2


def find_decaying_spans(layout: GradientLayout) -> list[tuple[int, int]]:
    """Return the flat ranges of all tensors with two or more dimensions, neighbours merged."""
    spans: list[tuple[int, int]] = []
    for slot in layout.iter_tensors():
        if not _is_matrix(slot):
            continue
        if spans and spans[-1][1] == slot.start:
            spans[-1] = (spans[-1][0], slot.stop)
        else:
            spans.append((slot.start, slot.stop))
    return spans


def _read_only(array: Flat) -> Flat:
    view = array.view()
    view.flags.writeable = False
    return view


def _little_endian(array: Flat) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").view(np.uint8).data
