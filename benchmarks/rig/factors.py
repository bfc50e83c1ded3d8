"""Two ways to average adapters in rounds that Motley does not have, to see what they bring.

The mean of several workers' products B A is not the product of their means. With A frozen it is
(`lora.freeze_a`); these keep both factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.model.header_layout import PEFT_PREFIX
from trainer.model.layout import SIDE_A, GradientLayout, TensorSlot
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inner_steps import InnerSteps, Moved

Float32 = NDArray[np.float32]


class Pair(NamedTuple):
    """The two sides of an adapter."""

    a: TensorSlot
    b: TensorSlot

    @property
    def module(self) -> str:
        """The linear's name in the model."""
        return self.a.name.removeprefix(PEFT_PREFIX).removesuffix(SIDE_A)

    def of(self, flat: Float32) -> tuple[Float32, Float32]:
        """Return views of A `[r, in]` and B `[out, r]` in a flat vector."""
        a, b = (flat[slot.start : slot.stop].reshape(slot.shape) for slot in self)
        return a, b


def pairs(layout: GradientLayout) -> Iterator[Pair]:
    """Yield every adapter."""
    slots = list(layout.tensors())
    for a, b in pairwise(slots):
        if a.name.endswith(SIDE_A):
            yield Pair(a, b)


class Rotated(InnerSteps):
    """Each worker turns its factors into the common frame before they are averaged (FedRot-LoRA).

    B A = (B R)(R^T A) for every orthogonal R `[r, r]`. The one that brings both factors nearest to
    the common ones is U V^T, of the singular vectors of A_i A^T + B_i^T B (Schoenemann 1966).
    """

    def run(self, *args: Any, **settings: Any) -> Moved:
        """Train as ever, then rotate what is sent."""
        moved = super().run(*args, **settings)
        for pair in pairs(self._layout):
            a, b = pair.of(self._weights)
            common_a, common_b = pair.of(self._common.weights)
            u, _, v = np.linalg.svd(a @ common_a.T + b.T @ common_b)
            turn = (u @ v).astype(np.float32)
            a[...], b[...] = turn.T @ a, b @ turn
        return moved


class Folding(InnerSteps):
    """What the mean of products has beyond the product of means goes into the base (FedEx-LoRA).

    W += scale (sum of w_i B_i A_i / sum of w_i - B A), arXiv:2410.09432. The bytes of that are not
    counted: of three workers it has three times the rank, so three times those of the adapters.
    """

    made: list[Folding]
    """Those of the run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight = 0
        type(self).made.append(self)

    def run(self, *args: Any, **settings: Any) -> Moved:
        """Train as ever, and note the weight of it."""
        moved = super().run(*args, **settings)
        self.weight = moved.result.weight
        return moved

    @classmethod
    def fold(cls, replica: TorchReplica, model: Any, weights: Float32, scale: float) -> None:
        """Fold after a round that made `weights` the common ones."""
        total = sum(each.weight for each in cls.made)
        for pair in pairs(replica.layout):
            a, b = pair.of(weights)
            rest = -(b @ a)
            for each in cls.made:
                own_a, own_b = pair.of(each._weights)
                rest += (own_b @ own_a) * np.float32(each.weight / total)
            base = model.get_submodule(pair.module).base_layer
            # Not in place: the weights may lie in the model's file.
            base.weight.data = base.weight.data + torch.from_numpy(rest * np.float32(scale))
