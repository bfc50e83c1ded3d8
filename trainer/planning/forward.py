"""The memory of a model that computes forwards alone: teachers, answers, and layers that stay.

Nothing is kept for a backward, so that beside the weights one layer's tensors are there at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.config.run import Quantization, RunConfig
from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.planning.memory import stage_holdings
from trainer.planning.replica import make_training_setup
from trainer.planning.shapes import ModelShape
from trainer.planning.stored_layers import frozen_bytes, passing_layers
from trainer.planning.strategy import FP32, Strategy, TrainingSetup

_SCORES = 6
"""Tensors of a number for each head and pair of tokens, where attention is not fused: measured 3
(gpt-oss) to 5.5 (Gemma 2)."""


class ForwardSize(NamedTuple):
    """The tokens of one forward, and of its longest window."""

    tokens: int
    """0: as many as the device computes at once by default."""
    length: int
    cached: int = 0
    """Tokens whose keys and values are kept beside it."""
    elsewhere: int = 0
    """Layers whose keys and values another device keeps."""


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """Bytes on the device."""

    weights: int
    """Those that stay, and adapters."""
    passing: int
    """Memory that layers read at each use pass through."""
    working: int
    """Tensors, logits, keys and values of a forward."""
    resident: int | None
    """Layers whose linears stay; None: all."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.passing + self.working


def forward_bytes(
    shape: ModelShape, tokens: int, width: int, length: int, *, accelerator: bool
) -> int:
    """Return the bytes of a forward beside its weights: one layer's tensors and some logits.

    Args:
        tokens: of the forward.
        width: bytes of an element.
        length: tokens of a window.
    """
    columns = max(shape.active_experts * shape.inner + shape.shared_inner, shape.dense_inner)
    a_token = 4 * shape.hidden + 2 * (shape.queries + shape.keys) + shape.mlp_matrices * columns
    if shape.kept is not None and shape.kept.scores:
        a_token += _SCORES * shape.heads * length
    logits = min(tokens * shape.vocab, LOGIT_ELEMENTS * (8 if accelerator else 1))
    return tokens * a_token * width + 3 * 4 * logits


def frozen_setup(width: int, quantization: Quantization = "none") -> TrainingSetup:
    """Return a model without adapters whose weights have `width` bytes, but for those in NF4."""
    sizes = replace(FP32, frozen=width, activation=width)
    method = "qlora" if quantization == "nf4" else "lora"
    return TrainingSetup(method=method, adapters=0, precision=sizes)


def used_setup(config: RunConfig, adapters: int, *, accelerator: bool) -> TrainingSetup:
    """Return a trained model that is used, not trained further.

    Args:
        adapters: elements of what was trained beside a base.
    """
    training = make_training_setup(config, accelerator=accelerator, recompute=True)
    if config.method == "full":
        frozen = frozen_setup(4, config.model.quantization)
        return replace(frozen, length=training.length, classes=training.classes)
    return replace(training, adapters=adapters)


def plan_forward(
    shape: ModelShape,
    training: TrainingSetup,
    size: ForwardSize,
    resident: int | None,
    *,
    accelerator: bool,
    width: int | None = None,
) -> ForwardPlan:
    """Return the plan of a model of which `resident` layers stay; None: all.

    Args:
        width: bytes of an element that is computed; None: as of the weights.
    """
    training = replace(training, resident=resident)
    kept = stage_holdings(shape, training, Strategy(), 0)
    width = width or training.precision.frozen
    stay = sum(part.value for part in frozen_bytes(kept, training, 1)) + 4 * kept.new
    passing = sum(part.value for part in passing_layers(shape, training))
    if training.method == "qlora" and resident is None:  # one linear is out of NF4
        passing = training.precision.activation * shape.widest_linear
    working = 0
    if size.tokens:
        working = forward_bytes(shape, size.tokens, width, size.length, accelerator=accelerator)
    return ForwardPlan(
        weights=int(stay),
        passing=int(passing),
        working=working + 2 * size.cached * (shape.layers - size.elsewhere) * shape.keys * width,
        resident=resident,
    )
