"""The sections of learning from a teacher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.config.limits import HOTTEST
from trainer.config.section import Section

Divergence = Literal["forward", "reverse", "jsd"]


class OnPolicyConfig(Section):
    """A student's own answers to prompts, which its teachers score (GKD, arXiv:2306.13649)."""

    prompts: str = Field(min_length=1)
    """Data of any format: texts, or conversations whose last answer is written again."""
    fraction: float = Field(default=0.5, gt=0, le=1)
    """Fraction of each step's samples that are answers; the others are the corpus's."""
    max_new_tokens: int = Field(default=128, gt=0)
    """The most tokens of an answer."""
    temperature: float = Field(default=1.0, gt=0, le=HOTTEST)
    """Temperature of sampling; the divergence takes `distillation.temperature`."""
    staleness: int = Field(default=8, ge=0)
    """The most steps between the weights that wrote an answer and those that learn from it.

    The teachers have about half of them for their work; 0 lets the student wait for each score."""
    divergence: Literal["reverse", "jsd"] = "reverse"
    """`reverse`: KL(student || teacher); `jsd`: the generalised Jensen-Shannon divergence with
    `beta`."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """The teacher's part in the mixture of `jsd`: near 0 as forward KL, near 1 as reverse KL."""

    @property
    def iteration_steps(self) -> int:
        """Steps that learn from the answers of one iteration."""
        return max(1, (self.staleness + 1) // 2)

    @property
    def prefetched_iterations(self) -> int:
        """Iterations whose answers are generated before they are needed."""
        return 1 if self.staleness else 0

    def count_answers(self, batch_size: int) -> int:
        """Return how many of a step's samples are answers."""
        return min(batch_size, max(1, round(self.fraction * batch_size)))


class DistillationConfig(Section):
    """Learning from a teacher's logits: alpha T^2 KL + (1 - alpha) CE (arXiv:1503.02531).

    `data.train` is then a folder that `trainer distill teacher` wrote.
    """

    alpha: float = Field(default=0.7, ge=0, le=1)
    """Weight of the divergence; 0 is only cross-entropy."""
    alpha_final: float | None = Field(default=None, ge=0, le=1)
    """Alpha at the last step, approached linearly; null: it is constant."""
    temperature: float = Field(default=1.0, gt=0, le=HOTTEST)
    """Temperature of teacher and student in the divergence."""
    divergence: Divergence = "forward"
    """`forward`: KL(teacher || student); `reverse`: KL(student || teacher); `jsd`: their mean
    around the mixture."""
    on_policy: OnPolicyConfig | None = None
    """Learning from answers of the student's own, too; null: only from the corpus."""

    @property
    def has_divergence(self) -> bool:
        """Whether a step may compute it."""
        return bool(self.alpha or self.alpha_final or self.on_policy)
