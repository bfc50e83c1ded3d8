"""The Replica protocol: one copy of the model that can run forward and backward.

Every backend implements it; one contract test runs them all. A replica sees weights only as the
flat fp32 vector of the layout, and never applies an update itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainer.model.layout import GradientLayout

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

OnBlock = Callable[[int, np.ndarray], None]
"""Takes a block's index and its gradient, fp32 `[block.size]`, valid only during the call."""


@dataclass(frozen=True)
class StepResult:
    """What one shard's forward and backward came to."""

    loss_sum: float
    """Sum of the loss over samples (classify) or valid target tokens (causal-lm)."""
    weight: int
    """How many samples or valid target tokens that sum is over."""
    tokens: int
    """Input tokens without padding."""
    seconds: float
    ce_sum: float | None = None
    """Of a distillation step: the sum of the cross-entropy alone."""
    kl_sum: float | None = None
    """Of a distillation step: the sum of the divergence from the teacher alone, in nats."""


@dataclass(frozen=True)
class EvalResult:
    """What a forward without gradients came to; sums, so that results add up."""

    loss_sum: float
    """Of the cross-entropy, also where samples have soft targets."""
    weight: int
    confusion: list[list[int]] | None
    """Counts as `confusion[label][prediction]`; None for causal-lm."""


class Replica(Protocol):
    """A model copy on one device or replica group."""

    @property
    def layout(self) -> GradientLayout:
        """The layout of the flat vectors below."""
        ...

    @property
    def device(self) -> str:
        """Where it runs, such as `cpu` or `cuda:0`."""
        ...

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard and hand out each block's gradient as soon as it is final.

        Gradients are sums over the whole shard, not means. `on_block` is called once a block, in
        `layout.send_order`, while backward still runs where the backend can; what it raises
        surfaces here. An empty batch gives zeros. NaN and Inf are passed on as they are.

        Samples with soft targets have the loss of `distillation`, with `alpha` as the divergence's
        share, or that of the config.
        """
        ...

    def write_trainable(self, flat: np.ndarray) -> None:
        """Copy fp32 `[layout.size]` into the trainable weights."""
        ...

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run forward alone; later gradients are as if it had not happened."""
        ...
