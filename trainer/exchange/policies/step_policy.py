"""The step policies: when members exchange, what they send, and how it is applied.

`EveryStep` exchanges gradients at every step; with `OuterSteps` workers take several inner steps
between two exchanges (DiLoCo).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer.config.run import RunConfig
from trainer.exchange.policies.auto_codec import CodecChoice
from trainer.exchange.policies.feedback import make_sender_codec
from trainer.exchange.protocol.codecs import SenderCodec
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import Gradient, TrainState
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.optimizer.nesterov import Update


@dataclass(frozen=True)
class StepTerms:
    """How the members exchange one step."""

    codec: str
    """As a setting."""
    in_bf16: bool = False
    """Whether what a quantised codec would encode is sent in bf16."""
    flushes_residuals: bool = True
    """Whether nothing private to a member is left after it."""
    second_moments: bool = False
    """Whether those of the workers follow, as blocks of their own."""
    inner_steps: int = 0
    """Steps that each worker takes alone before it sends how far they moved the weights; 0: it
    sends a gradient."""


class EveryStep:
    """Exchange gradients at every step, and apply their mean as the workers do."""

    def __init__(
        self,
        config: RunConfig,
        layout: GradientLayout,
        plan: StepPlan,
        emit: Callable[..., None],
    ) -> None:
        """Take the function that logs events."""
        self.plan = plan
        """The samples of each step."""
        self.wire_layout = self._wire_layout(layout)
        """The layout of the most blocks that a step can have."""
        rounds = config.exchange.has_rounds
        self.codec = make_sender_codec(config.exchange.codec, layout, rounds=rounds)
        """The codec of averages, in outer steps with their residual."""
        self.choice = CodecChoice(config.exchange, layout, plan, emit)
        self.residuals = Residuals(self.codec, plan, emit)
        self._optimizer = config.optimizer
        self._update = Update(config, layout)

    def make_terms(self, step: int) -> StepTerms:
        """Return how a step, counted from 0, is exchanged."""
        return StepTerms(self.choice.find_codec(step), self.choice.is_bf16(step))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the last inner step of a step."""
        plan = self.plan
        return compute_learning_rate(
            plan.find_inner_steps(step)[-1], plan.total_inner, self._optimizer
        )

    def clip_scale(self, step: int, norm: float) -> float:
        """Return the factor for a step's average of this norm."""
        return self._update.clip_scale(norm, is_round=self.plan.is_outer_step(step))

    def apply_update(self, state: TrainState, average: Gradient, rate: float, scale: float) -> None:
        """Apply the update of its next step to `state`."""
        self._update.apply(state, average, rate, scale, self.plan.first_outer_step)

    def _wire_layout(self, layout: GradientLayout) -> GradientLayout:
        return layout


class OuterSteps(EveryStep):
    """Exchange how far inner steps moved each worker's weights, and the second moments at times.

    Steps before the plan's first outer step are those of `EveryStep`.
    """

    def make_terms(self, step: int) -> StepTerms:
        """Return how a step is exchanged.

        One that flushes is sent in bf16, and averages second moments too.
        """
        terms, flushes = super().make_terms(step), self.plan.flushes_residuals(step)
        terms = replace(terms, in_bf16=terms.in_bf16 or flushes, flushes_residuals=flushes)
        if not self.plan.is_outer_step(step):
            return terms
        return replace(terms, second_moments=flushes, inner_steps=self.plan.inner_steps)

    def _wire_layout(self, layout: GradientLayout) -> GradientLayout:
        return layout.with_second_moments


def make_policy(
    config: RunConfig, layout: GradientLayout, plan: StepPlan, emit: Callable[..., None]
) -> EveryStep:
    """Return the policy of a run."""
    made = OuterSteps if config.exchange.has_rounds else EveryStep
    return made(config, layout, plan, emit)


class Residuals:
    """The unsent residuals of a run: the coordinator's own, and the norms that members report.

    Where the codec has no feedback there are none.
    """

    def __init__(self, codec: SenderCodec, plan: StepPlan, emit: Callable[..., None]) -> None:
        """Take the codec of the coordinator's averages, and the function that logs events."""
        self._codec, self._plan, self._emit = codec, plan, emit
        self._norms: dict[int, float] = {}

    def has_residuals(self, step: int) -> bool:
        """Return whether contributions to a step hold the residuals of many."""
        return self._codec.has_feedback and self._plan.flushes_residuals(step)

    def record_norm(self, rank: int, norm: float) -> None:
        """Record the norm of a member's residual after a shard."""
        if self._codec.has_feedback:
            self._norms[rank] = norm

    def report_lost(self, rank: int, reason: str) -> None:
        """Report a rank's residual as lost: it will not be sent."""
        self._emit_lost(rank, self._norms.pop(rank, 0.0), reason)

    def record_commit(self, *, flushed: bool) -> None:
        """Reset all norms after a flush step; a worker drops a residual it could not send."""
        if flushed:
            for rank in sorted(self._norms):
                self.report_lost(rank, "it had no assignment in the flush step")
            self._codec.clear_residuals()

    def record_save(self, step: int) -> None:
        """Report the residuals that a run loses when it resumes from the state after `step`."""
        if self._plan.flushes_residuals(step - 1):
            return
        reason = "saved between two flush commits: a resumed run begins without it"
        for rank, norm in sorted(self._norms.items()):
            self._emit_lost(rank, norm, reason)
        self._emit_lost(None, self._codec.norm, reason)

    def _emit_lost(self, rank: int | None, norm: float, reason: str) -> None:
        if norm:
            self._emit("residual_lost", rank=rank, norm=norm, reason=reason)
