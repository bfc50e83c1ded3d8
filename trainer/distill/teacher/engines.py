"""What can compute a teacher's forward: one interface, and the table of engines.

Torch-free: an engine's library is imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.system.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

    def prefill(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
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


@dataclass(frozen=True)
class EngineKind:
    """An engine of the table."""

    open: Callable[[Path, str, Compute], Engine]
    """Takes the model's folder and the dtype of the forward; raises InputError."""
    quantization: str
    """Of the weights, as the description of a folder of logits names it."""
    is_reference: bool = False
    """Whether it computes as transformers does without a proof at each start."""


def _torch(model_dir: Path, dtype: str, compute: Compute) -> Engine:
    from trainer.distill.teacher.torch_engine import open_torch

    return open_torch(model_dir, dtype, compute)


def _openvino(model_dir: Path, dtype: str, compute: Compute) -> Engine:
    from trainer.distill.teacher.openvino_engine import open_openvino

    return open_openvino(model_dir, dtype, compute)


ENGINES = {
    # Transformers' own code, or the decoder that the tests compare with it.
    "torch": EngineKind(_torch, "none", is_reference=True),
    "openvino": EngineKind(_openvino, "int8"),
}


def engine_kind(name: str) -> EngineKind:
    """Return an engine of the table.

    Raises:
        InputError: there is none of this name.
    """
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is unknown; this version has {', '.join(ENGINES)}")
    return ENGINES[name]
