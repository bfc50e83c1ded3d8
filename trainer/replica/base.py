"""The Replica protocol: one copy of the model that can run forward and backward.

Every backend implements it; one contract test runs them all. A replica sees weights only as the
flat fp32 vector of the layout, and never applies an update itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.data.metrics import class_scores, mean_loss, sum_confusions, sum_figures
from trainer.model.layout import GradientLayout

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

OnBlock = Callable[[int, np.ndarray], None]
"""Takes a block's index and its gradient, fp32 `[block.size]`, which is the receiver's, to change
too, until the next `forward_backward` begins."""


@dataclass(frozen=True)
class StepResult:
    """The result of one shard's forward and backward."""

    loss_sum: float
    """Sum of the loss over samples (classify), valid target tokens (causal-lm) or pairs (dpo)."""
    weight: int
    """The number of samples, valid target tokens or pairs in that sum, or the sum of their
    `training.class_weights`."""
    tokens: int
    """Input tokens without padding."""
    seconds: float
    ce_sum: float | None = None
    """Sum of the cross-entropy alone, in a distillation step."""
    kl_sum: float | None = None
    """Sum of the divergence from the teacher alone, in nats, in a distillation step."""


@dataclass(frozen=True)
class EvalResult:
    """The result of a forward without gradients; sums, so that results add up."""

    loss_sum: float
    """Sum of the cross-entropy, also if samples have soft targets."""
    weight: int
    confusion: list[list[int]] | None
    """Counts as `confusion[label][prediction]`; None but for a classifier."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """Sums over the samples by name: a script's own, and rewards of pairs."""

    @classmethod
    def sum_parts(cls, parts: Sequence[EvalResult]) -> EvalResult:
        """Return the result of all parts together."""
        loss_sum, weight = sum(part.loss_sum for part in parts), sum(part.weight for part in parts)
        confusion = sum_confusions(part.confusion for part in parts)
        figures = sum_figures([part.figures for part in parts])
        return cls(loss_sum, weight, confusion, figures)

    def compute_scores(self) -> dict[str, Any]:
        """Return the figures of a validation: loss; accuracy, mcc and confusion of a classifier;
        rewards of pairs.
        """
        scores: dict[str, Any] = {"loss": mean_loss(self.loss_sum, self.weight)}
        if self.confusion is not None:
            scores |= {**class_scores(self.confusion), "confusion": self.confusion}
        weight = max(self.weight, 1)
        return scores | {name: value / weight for name, value in self.figures.items()}


class Replica(Protocol):
    """A model copy on one device or replica group."""

    @property
    def layout(self) -> GradientLayout:
        """The layout of the flat vectors below."""
        ...

    @property
    def device(self) -> str:
        """Its device, such as `cpu` or `cuda:0`."""
        ...

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard and hand out each block's gradient as soon as it is final.

        Gradients are sums over the whole shard, not means. `on_block` is called once a block, in
        `layout.send_order`, during backward if the backend can; its exceptions are raised here.
        An empty batch gives zeros. NaN and Inf are passed on.

        Samples with soft targets have the loss of `distillation`, with `alpha` as the divergence's
        share, or that of the config.
        """
        ...

    def write_trainable(self, flat: np.ndarray) -> None:
        """Take the trainable weights, fp32 `[layout.size]`.

        A replica on the host may compute with the array itself, so it stays as it is during the
        other calls; after each change it is written again.
        """
        ...

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass, without an effect on later gradients."""
        ...

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Return the likeliest new tokens of each prompt, at most so many; one of `stop` is a last.

        Raises:
            InputError: prompts and new tokens do not fit.
        """
        ...
