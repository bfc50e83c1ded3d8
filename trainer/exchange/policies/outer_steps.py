"""The policy of a run whose workers take several inner steps between two exchanges (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainer.config.run import RunConfig
from trainer.exchange.policies.every_step import EveryStep, StepTerms
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout


class OuterSteps(EveryStep):
    """Exchange how far inner steps moved each worker's weights, and the second moments at times.

    Steps before the plan's first outer step are those of `EveryStep`.
    """

    def make_terms(self, step: int) -> StepTerms:
        """Return how a step is exchanged; a settled outer step averages second moments too."""
        terms = super().make_terms(step)
        if not self.plan.is_outer_step(step):
            return terms
        settles = self.plan.flushes_residuals(step)
        return replace(terms, second_moments=settles, inner_steps=self.plan.inner_steps)

    def _wire_layout(self, layout: GradientLayout) -> GradientLayout:
        return layout.with_second_moments


def make_policy(
    config: RunConfig, layout: GradientLayout, plan: StepPlan, emit: Callable[..., None]
) -> EveryStep:
    """Return the policy of a run."""
    made = OuterSteps if config.exchange.has_rounds else EveryStep
    return made(config, layout, plan, emit)
