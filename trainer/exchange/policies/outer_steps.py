"""The policy of a run whose workers take several inner steps between two exchanges (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainer.config.run import RunConfig
from trainer.exchange.policies.every_step import EveryStep, StepTerms
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import Gradient, TrainState
from trainer.optimizer.nesterov import Update


class OuterSteps(EveryStep):
    """Exchange how far inner steps moved each worker's weights; apply the mean by Nesterov.

    Steps before the plan's first outer step are those of `EveryStep`.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: GradientLayout,
        plan: StepPlan,
        emit: Callable[..., None],
    ) -> None:
        super().__init__(config, layout, plan, emit)
        self._update = Update(config, layout)

    def terms(self, step: int) -> StepTerms:
        """Return how a step is exchanged; a settled outer step averages second moments too."""
        terms = super().terms(step)
        if not self.plan.is_round(step):
            return terms
        settles = self.plan.settles(step)
        return replace(terms, second_moments=settles, inner_steps=self.plan.inner_steps)

    def clip_scale(self, step: int, norm: float) -> float:
        """Return the factor for a step's average; that of an outer step is 1: inner steps clip."""
        return self._update.clip_scale(norm, is_round=self.plan.is_round(step))

    def apply(self, state: TrainState, average: Gradient, rate: float, scale: float) -> None:
        """Move `state` by the update of its next step."""
        self._update.apply(state, average, rate, scale, self.plan.first_round)

    def _wire_layout(self, layout: GradientLayout) -> GradientLayout:
        return layout.doubled


def make_policy(
    config: RunConfig, layout: GradientLayout, plan: StepPlan, emit: Callable[..., None]
) -> EveryStep:
    """Return the policy of a run."""
    made = OuterSteps if config.exchange.has_rounds else EveryStep
    return made(config, layout, plan, emit)
