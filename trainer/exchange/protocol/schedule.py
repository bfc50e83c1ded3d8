"""Which samples a step takes: the plan of all steps of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.codec import read_codec
from trainer.config.run import RunConfig


@dataclass(frozen=True)
class StepSamples:
    """Positions `start..stop` of an epoch's order."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """Steps of `batch_size` samples over `epochs` of `samples`; the last of an epoch is smaller.

    `max_steps`, where given, decides instead of `epochs`, as in transformers. `settle_every` lists
    the periods, in steps, at whose ends nobody may owe anything.
    """

    samples: int
    batch_size: int
    epochs: int
    max_steps: int | None = None
    settle_every: tuple[int, ...] = (1,)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps that see every sample once."""
        return -(-self.samples // self.batch_size)

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the run."""
        return self.max_steps or self.steps_per_epoch * self.epochs

    def at(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return StepSamples(epoch, start, min(start + self.batch_size, self.samples))

    def settles(self, step: int) -> bool:
        """Return whether the commit of a step, counted from 0, leaves nothing owed by anybody."""
        done = step + 1
        return done == self.total_steps or any(done % every == 0 for every in self.settle_every)


def settle_periods(config: RunConfig) -> tuple[int, ...]:
    """Return a plan's `settle_every`: checkpoints, also those of validations, are settled."""
    if not read_codec(config.exchange.codec).needs_feedback:
        return (1,)
    periods = (
        config.exchange.settle_every,
        config.checkpoint.every,
        config.training.evaluate_every,
    )
    return tuple(period for period in periods if period)
