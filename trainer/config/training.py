"""The section `training`: duration, batches, and how a step is computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainer.config.section import Section

Positive = Annotated[int, Field(gt=0)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""At most what no run reaches: a number that was typed with the keyboard stuck is refused."""
Samples = Annotated[int, Field(gt=0, le=1_000_000)]
Precision = Literal["fp32", "bf16", "fp16"]


class DpoConfig(Section):
    """Learning preferences by comparison (DPO, arXiv:2305.18290), of task `dpo`."""

    beta: float = Field(default=0.1, gt=0, le=1000)
    """How strongly the model is held to the reference, which is itself without its adapter."""


class TrainingConfig(Section):
    """Duration, batches, precision and memory of a step."""

    epochs: int = Field(default=1, gt=0, le=1_000_000)
    """Passes over the data."""
    max_steps: Steps | None = None
    """Number of steps, over as many epochs as they take; null: `epochs` decides."""
    batch_size: Samples = 16
    """Samples in one step, over all workers together."""
    micro_batch_size: Samples | Literal["auto"] = "auto"
    """Samples in one forward pass, or rows with `training.pack`; `auto` finds the most that fit the
    device."""
    pack: bool = False
    """Put several short samples of a `causal-lm` run into one row; wgpu pads each, with the same
    results."""
    precision: Literal["auto"] | Precision = "auto"
    """Format of products in forward and backward by torch; `auto`: bf16 on CUDA, `model.dtype` on
    the CPU; fp32 of a script."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """`on` keeps only inputs of layers and computes layers twice: a third more time; `auto`: if
    memory is short."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of samples and the initial adapters."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each target that is spread over all classes, as in torch's `cross_entropy`; for
    `classify`."""
    class_weights: tuple[Annotated[int, Field(gt=0, le=1_000_000)], ...] | None = None
    """How much a sample of each class counts, such as `[1, 4]`, for `classify`; null: all the same.

    Only ratios matter, so whole numbers are enough: weights add up exactly in any split."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between validations; 0: once, at the end of the run."""
    sample_prompts: str | None = Field(default=None, min_length=1)
    """File of prompts that the model answers before the first step and after the last; null: none.

    Only the coordinator reads it."""
    sample_every: int = Field(default=0, ge=0)
    """Steps between answers in between; 0: none."""
    sample_tokens: Annotated[int, Field(gt=0, le=4096)] = 64
    """The most tokens of an answer; with the prompt at most `data.max_seq_len`."""
    early_stopping_patience: Positive | None = None
    """End after so many validations in a row without a lower loss; null: never."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _restore_word(cls, value: object) -> object:
        """Return the word for what YAML 1.1 makes of an unquoted `on` or `off`."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    def count_samples(self, epoch: float) -> float:
        """Return the samples of all steps, with `epoch` samples in an epoch."""
        return self.epochs * epoch if self.max_steps is None else self.max_steps * self.batch_size

    @property
    def recompute(self) -> bool | None:
        """Whether layers are computed twice; None if memory decides."""
        return {"auto": None, "on": True, "off": False}[self.gradient_checkpointing]
