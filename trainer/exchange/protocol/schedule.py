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
    """Steps of the run over `epochs` of `samples`, `inner_steps` of `batch_size` samples in each.

    An ordinary step has one inner step; one of more is a round (docs/low-bandwidth.md). A step ends
    with its epoch, so the last of an epoch may be smaller. `max_steps`, where given, counts inner
    steps and decides instead of `epochs`, as in transformers.
    """

    samples: int
    batch_size: int
    epochs: int
    max_steps: int | None = None
    inner_steps: int = 1
    settle_every: tuple[int, ...] = (1,)
    """A step is settled if its number, counted from 1, is a multiple of one of these."""

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of inner steps that see every sample once."""
        return -(-self.samples // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps that see every sample once."""
        return -(-self.batches_per_epoch // self.inner_steps)

    @property
    def total_inner(self) -> int:
        """Return the number of inner steps of the run."""
        return self.max_steps or self.batches_per_epoch * self.epochs

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the run."""
        epochs, rest = divmod(self.total_inner, self.batches_per_epoch)
        return epochs * self.steps_per_epoch + -(-rest // self.inner_steps)

    def inner(self, step: int) -> range:
        """Return the inner steps of a step, both counted from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        before = epoch * self.batches_per_epoch
        start = before + index * self.inner_steps
        stop = min(start + self.inner_steps, before + self.batches_per_epoch, self.total_inner)
        return range(start, max(start, stop))

    def at(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.inner_steps * self.batch_size
        stop = start + len(self.inner(step)) * self.batch_size
        return StepSamples(epoch, start, min(stop, self.samples))

    def settles(self, step: int) -> bool:
        """Return whether a step, counted from 0, leaves nothing private to a worker."""
        done = step + 1
        return done == self.total_steps or any(done % every == 0 for every in self.settle_every)

    def settled(self, done: int) -> int:
        """Return after how many inner steps the last settled of the first `done` steps ended."""
        return next((self.inner(s).stop for s in reversed(range(done)) if self.settles(s)), 0)


def settle_periods(config: RunConfig) -> tuple[int, ...]:
    """Return a plan's `settle_every`: checkpoints, also those of validations, are settled."""
    exchange = config.exchange
    if not exchange.in_rounds and not read_codec(exchange.codec).needs_feedback:
        return (1,)
    return exchange.settled_at(*config.saved_every)
