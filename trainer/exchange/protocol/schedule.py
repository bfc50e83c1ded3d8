"""Which samples a step takes: the plan of all steps of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSamples:
    """Positions `start..stop` of an epoch's order."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """Steps of `batch_size` samples over `epochs` of `samples`; the last of an epoch is smaller.

    `max_steps`, where given, decides instead of `epochs`, as in transformers.
    """

    samples: int
    batch_size: int
    epochs: int
    max_steps: int | None = None

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
