"""The settings of rounds: several steps by each worker alone, then one exchange."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.section import Section
from trainer.config.training import Steps
from trainer.system.errors import InputError

FEWEST_ROUNDS = 20
"""Outer updates below which a run is refused: a momentum of 0.9 has a horizon of ten."""


class RoundSettings(Section):
    """DiLoCo (arXiv:2311.08105); see docs/low-bandwidth.md."""

    schedule: Literal["steps", "rounds", "auto"] = "steps"
    """`steps` exchanges gradients at every step, `rounds` weights after `inner_steps` of them,
    `auto` begins with steps and goes over to rounds if no lossless codec hides the exchange."""
    inner_steps: Steps = 20
    """Steps of a round, of a worker of mean speed; a faster one does more, a slower one fewer."""
    rounds_after: Annotated[int, Field(ge=0)] = 0
    """Ordinary steps before the first round (post-local SGD, arXiv:1808.07217)."""
    outer_learning_rate: float = Field(default=1.0, gt=0, le=10)
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    """Nesterov's; 0 with an outer learning rate of 1 is the mean of all workers' weights. DiLoCo's
    own are 0.7 and 0.9, for long runs: fine-tunes of some hundred steps lose far more with them."""
    settle_every: Annotated[int, Field(gt=0)] | None = None
    """Steps, or rounds, between settled commits; saved steps are always settled."""

    @property
    def rounds(self) -> tuple[int, int] | None:
        """`rounds_after` and `inner_steps`, as far as they are settings; None: no rounds so far."""
        return (self.rounds_after, self.inner_steps) if self.schedule == "rounds" else None

    @property
    def may_have_rounds(self) -> bool:
        """Whether a step of the run may be a round."""
        return self.schedule != "steps"

    def settled_at(self, *saved_every: int) -> tuple[int, ...]:
        """Return the intervals of settled steps, with those at whose ends a run is saved."""
        return tuple(sorted({every for every in (self.settle_every or 0, *saved_every) if every}))

    def agreed(self, *saved_every: int) -> dict[str, Any] | None:
        """Return what all members must share; None if they exchange gradients at every step."""
        if not self.may_have_rounds:
            return None
        fixed = {"inner_steps": self.inner_steps, "rounds_after": self.rounds_after}
        return {
            **(fixed if self.rounds else {"schedule": self.schedule}),
            "outer_learning_rate": self.outer_learning_rate,
            "outer_momentum": self.outer_momentum,
            "settled_at": list(self.settled_at(*saved_every)),
        }

    def check_length(self, total_inner: int) -> None:
        """Check that rounds are short enough for a run of so many inner steps.

        Raises:
            InputError: they are not, which says how long a round may be; or none would begin.
        """
        if not self.rounds:
            return
        longest = total_inner // FEWEST_ROUNDS
        if self.inner_steps > longest:
            remedy = f"give at most {longest}, or leave" if longest else "leave"
            raise InputError(
                f"exchange.inner_steps: {self.inner_steps} of the run's {total_inner} steps leave"
                f" fewer than {FEWEST_ROUNDS} rounds, too few for the outer update; {remedy}"
                " exchange.schedule at steps"
            )
        if self.rounds_after >= total_inner:
            raise InputError(
                f"exchange.rounds_after: the run has {total_inner} steps, so no round would begin"
                f" after {self.rounds_after}; give less, or leave exchange.schedule at steps"
            )

    def check_every_step(self, what: str) -> None:
        """Check that a kind of training that has no rounds can follow the settings.

        Raises:
            InputError: it cannot.
        """
        if self.may_have_rounds:
            raise InputError(
                f"exchange.schedule: {what} has no rounds, which need a coordinator and workers;"
                " leave it out"
            )
