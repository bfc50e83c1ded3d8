"""The section `optimizer`: AdamW and its learning rate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.config.section import Section

Scheduler = Literal["constant", "linear", "cosine", "wsd"]


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101) with linear warmup and a schedule of the learning rate."""

    learning_rate: float = Field(default=1e-4, gt=0, le=10)
    scheduler: Scheduler = "cosine"
    """After warmup: `cosine` (arXiv:1608.03983) and `linear` fall to `final_ratio`, `wsd` stays at
    the peak and then falls on a cosine (warmup-stable-decay, arXiv:2404.06395)."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of all steps with a rising learning rate."""
    decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of all steps, the last ones, in which `wsd` falls; null: a tenth."""
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the last step, as a share of the peak; not of `constant`."""
    weight_decay: float = Field(default=0.01, ge=0, le=100)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global norm above which the gradient is scaled down."""

    @model_validator(mode="after")
    def _phases(self) -> Self:
        if self.decay_ratio is not None and self.scheduler != "wsd":
            raise ValueError("decay_ratio is of scheduler wsd; leave it out, or set that")
        if self.scheduler == "wsd" and self.warmup_ratio + self.decay > 1:
            raise ValueError("warmup_ratio and decay_ratio are more than all steps together")
        return self

    @property
    def decay(self) -> float:
        """The share of all steps in which `wsd` falls."""
        return 0.1 if self.decay_ratio is None else self.decay_ratio
