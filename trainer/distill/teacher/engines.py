"""Engines of a teacher's forward: one interface, and how each is opened.

Torch-free: an engine's library is imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import Quantization
from trainer.config.teacher_engines import TEACHER_ENGINES, EngineFacts
from trainer.model.gguf.source import is_converted, stored_types
from trainer.planning.forward import ForwardSize
from trainer.system.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainer.distill.logits.description import TeacherInfo
    from trainer.replica.backend import Compute


class Engine(Protocol):
    """Computes the logits of given tokens."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, padding included."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        ...

    @property
    def place(self) -> str:
        """Where they are computed: `cpu`, `cuda:N` or `wgpu:N`."""
        ...

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """Yield the logits of every token but the first of each window, some rows at a time.

        Args:
            batch: teacher token ids of windows, `[T]` each.

        Yields:
            `[n, vocab_size]`, valid until the next; together the positions 1 to T - 1 of the
            first window, then those of the next one.

        Raises:
            MemoryError: the batch does not fit, a smaller one may; so does
                `torch.OutOfMemoryError`.
        """
        ...


class WeightType(NamedTuple):
    """The type of a teacher's weights, as far as its engine takes it."""

    dtype: str
    quantization: Quantization = "none"


def read_weight_type(teacher: TeacherInfo) -> WeightType:
    """Return the type of weights that a folder's description names."""
    return WeightType(teacher.dtype, "nf4" if teacher.quantization == "nf4" else "none")


@dataclass(frozen=True)
class EngineKind:
    """An engine of the table."""

    open: Callable[[Path, WeightType, Compute, ForwardSize], Engine]
    """Takes the model's folder, its weights' type and the size of a forward; raises InputError."""
    facts: EngineFacts


def _open_torch(
    model_dir: Path, weights: WeightType, compute: Compute, forward: ForwardSize
) -> Engine:
    from trainer.distill.teacher.torch_engine import open_torch

    return open_torch(model_dir, weights.dtype, compute, forward, weights.quantization)


def _open_openvino(
    model_dir: Path, weights: WeightType, compute: Compute, _forward: ForwardSize
) -> Engine:
    from trainer.distill.teacher.openvino_engine import open_openvino

    return open_openvino(model_dir, weights.dtype, compute)


def _open_gguf(
    model_dir: Path, _weights: WeightType, compute: Compute, _forward: ForwardSize
) -> Engine:
    from trainer.distill.teacher.gguf_engine import open_gguf

    return open_gguf(model_dir, compute)


def _open_wgpu(
    model_dir: Path, weights: WeightType, compute: Compute, forward: ForwardSize
) -> Engine:
    from trainer.distill.teacher.wgpu_engine import open_wgpu

    return open_wgpu(model_dir, weights.dtype, compute, forward, weights.quantization)


_OPENERS: dict[str, Callable[[Path, WeightType, Compute, ForwardSize], Engine]] = {
    "torch": _open_torch,
    "openvino": _open_openvino,
    "gguf": _open_gguf,
    "wgpu": _open_wgpu,
}
ENGINES: dict[str, EngineKind] = {
    name: EngineKind(_OPENERS[name], facts) for name, facts in TEACHER_ENGINES.items()
}


def engine_kind(name: str) -> EngineKind:
    """Return an engine of the table.

    Raises:
        InputError: there is none of this name.
    """
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is unknown; this version has {', '.join(ENGINES)}")
    return ENGINES[name]


def describe_quantization(name: str, model_dir: Path, asked: Quantization = "none") -> str:
    """Return how an engine holds a model's weights.

    Raises:
        InputError: the engine reads GGUF files alone, and this model is none.
    """
    facts = engine_kind(name).facts
    if facts.quantization is not None:
        return asked if facts.takes_dtype else facts.quantization
    if not is_converted(model_dir):
        raise InputError(
            f"--engine {name}: {model_dir} is not a GGUF file; give one, or use --engine torch"
        )
    return stored_types(model_dir)
