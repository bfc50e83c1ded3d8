"""The section `optimizer`: AdamW and its learning rate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.config.section import Section

Scheduler = Literal["constant", "linear", "cosine", "wsd"]


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101) with linear warmup and a schedule of the learning rate."""

    learning_rate: float = Field(default=1e-4, gt=0, le=10)
    """The peak, after warmup."""
    scheduler: Scheduler = "cosine"
    """After warmup `linear` and `cosine` fall to `final_ratio`; `wsd` stays at the peak, then falls
    on a cosine.

    cosine: arXiv:1608.03983; wsd (warmup-stable-decay): arXiv:2404.06395."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of all steps in which the rate rises."""
    decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Fraction of all steps, the last ones, in which the rate of `wsd` falls; null: a tenth."""
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """The last step's rate as a fraction of the peak; `constant` has none."""
    weight_decay: float = Field(default=0.01, ge=0, le=100)
    """Decoupled, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Least divisor of AdamW's update."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global norm above which the gradient is scaled down."""

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        if self.decay_ratio is not None and self.scheduler != "wsd":
            raise ValueError("decay_ratio is of scheduler wsd; leave it out, or set that")
        if self.scheduler == "wsd" and self.warmup_ratio + self.decay_fraction > 1:
            raise ValueError("warmup_ratio and decay_ratio are more than all steps together")
        return self

    @property
    def decay_fraction(self) -> float:
        """The fraction of all steps in which `wsd` falls."""
        return 0.1 if self.decay_ratio is None else self.decay_ratio
