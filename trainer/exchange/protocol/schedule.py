"""The plan of all steps of a run: the samples of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.config.run import RunConfig


@dataclass(frozen=True)
class StepSamples:
    """Positions `start..stop` of an epoch's order."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """Steps over `epochs` of `samples`: ordinary ones of `batch_size` samples, then rounds.

    A round (docs/low-bandwidth.md) has `inner_steps` inner steps, an ordinary step is one. A step
    ends with its epoch, so the last of an epoch may be smaller. `max_steps`, where given, counts
    inner steps and decides instead of `epochs`, as in transformers.
    """

    samples: int
    batch_size: int
    epochs: int
    max_steps: int | None = None
    inner_steps: int = 0
    """Inner steps of a round; 0: the run has no rounds."""
    flush_every: tuple[int, ...] = (1,)
    """A step is a flush step if its number, counted from 1, is a multiple of one of these."""
    rounds_after: int = 0
    """Ordinary steps before the first round."""

    @property
    def outer_steps(self) -> tuple[int, int] | None:
        """Return `rounds_after` and `inner_steps`; None: every step is an ordinary one."""
        return (self.rounds_after, self.inner_steps) if self.inner_steps else None

    def with_outer_steps(self, rounds: tuple[int, int] | None) -> StepPlan:
        """Return the plan with other `rounds`."""
        after, inner_steps = rounds or (0, 0)
        return replace(self, rounds_after=after, inner_steps=inner_steps)

    @property
    def first_outer_step(self) -> int | None:
        """Return the number of the first step that is a round, counted from 0; None: none is."""
        return min(self.rounds_after, self.total_inner) if self.inner_steps else None

    def is_outer_step(self, step: int) -> bool:
        """Return whether a step, counted from 0, is a round."""
        return self.first_outer_step is not None and step >= self.first_outer_step

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of inner steps that see every sample once."""
        return -(-self.samples // self.batch_size)

    @property
    def total_inner(self) -> int:
        """Return the number of inner steps of the run."""
        return self.max_steps or self.batches_per_epoch * self.epochs

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the run."""
        if self.first_outer_step is None:
            return self.total_inner
        last_epoch, rest = divmod(self.total_inner, self.batches_per_epoch)
        epoch, skipped = divmod(self.first_outer_step, self.batches_per_epoch)
        if epoch == last_epoch:
            return self.first_outer_step + self._count_outer_steps(rest - skipped)
        between = (last_epoch - epoch - 1) * self._count_outer_steps(self.batches_per_epoch)
        of_first = self._count_outer_steps(self.batches_per_epoch - skipped)
        return self.first_outer_step + of_first + between + self._count_outer_steps(rest)

    def find_inner_steps(self, step: int) -> range:
        """Return the inner steps of a step, both counted from 0."""
        first, length = self.first_outer_step, self.batches_per_epoch
        if first is None or step < first:
            return range(step, step + 1)
        epoch, skipped = divmod(first, length)
        index = step - first
        if (passed := index - self._count_outer_steps(length - skipped)) >= 0:
            epochs, index = divmod(passed, self._count_outer_steps(length))
            epoch, skipped = epoch + 1 + epochs, 0
        start = epoch * length + skipped + index * self.inner_steps
        stop = min(start + self.inner_steps, (epoch + 1) * length, self.total_inner)
        return range(start, max(start, stop))

    def find_samples(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 0."""
        inner = self.find_inner_steps(step)
        epoch, first = divmod(inner.start, self.batches_per_epoch)
        start = first * self.batch_size
        return StepSamples(epoch, start, min(start + len(inner) * self.batch_size, self.samples))

    def flushes_residuals(self, step: int) -> bool:
        """Return whether no worker has a residual after a step, counted from 0.

        So does the one before the first round: what is owed of gradients is none of weights.
        """
        done = step + 1
        last = done in (self.total_steps, self.first_outer_step)
        return last or any(done % every == 0 for every in self.flush_every)

    def count_flushed(self, done: int) -> int:
        """Return the inner steps up to the last step without residuals among the first `done`."""
        return next(
            (
                self.find_inner_steps(s).stop
                for s in reversed(range(done))
                if self.flushes_residuals(s)
            ),
            0,
        )

    def _count_outer_steps(self, inner_steps: int) -> int:
        return -(-inner_steps // self.inner_steps)


def flush_periods(config: RunConfig) -> tuple[int, ...]:
    """Return a plan's `flush_every`: checkpoints, also those of validations, are flush steps."""
    exchange = config.exchange
    return exchange.flush_intervals(*config.save_intervals) if exchange.has_rounds else (1,)
