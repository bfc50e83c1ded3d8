"""The section `exchange`: when, by what and around whom the members of a run exchange."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainer.config.codec import CodecName
from trainer.config.section import Section
from trainer.config.training import Positive, Steps
from trainer.system.errors import InputError

MIN_OUTER_STEPS = 20
"""Outer updates below which a run is refused: a momentum of 0.9 has a horizon of ten."""
MIN_RING_SIZE = 4
"""Workers of a ring."""
RING_NOTE = (
    "a ring is not elastic: a lost rank ends all, which start again at the newest checkpoint; and"
    " it is not encrypted: its network must be one you trust"
)
"""Note that is logged at the start of each ring."""


class RoundSettings(Section):
    """Rounds: several steps by each worker alone, then one exchange (DiLoCo, arXiv:2311.08105)."""

    schedule: Literal["steps", "rounds"] = "steps"
    """`steps` exchanges gradients at every step, `rounds` weights after `inner_steps` of them."""
    inner_steps: Steps = 20
    """Steps of a round, for a worker of mean speed; at most a twentieth of the run's."""
    rounds_after: Annotated[int, Field(ge=0)] = 0
    """Ordinary steps before the first round (post-local SGD, arXiv:1808.07217)."""
    outer_learning_rate: float = Field(default=1.0, gt=0, le=10)
    """Learning rate of the outer update."""
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    """Nesterov momentum of the outer update; 0 with an outer learning rate of 1 averages weights.

    DiLoCo's own are 0.7 and 0.9, for long runs: fine-tunes of some hundred steps lose far more with
    them."""
    flush_every: Annotated[int, Field(gt=0)] | None = None
    """Steps of a run with rounds between commits that leave no private state on a worker; saved
    ones always are such."""

    @property
    def rounds(self) -> tuple[int, int] | None:
        """`rounds_after` and `inner_steps`; None: every step is an ordinary one."""
        return (self.rounds_after, self.inner_steps) if self.has_rounds else None

    @property
    def has_rounds(self) -> bool:
        """Whether a step of the run may be a round."""
        return self.schedule == "rounds"

    def flush_intervals(self, *save_intervals: int) -> tuple[int, ...]:
        """Return the intervals of flush steps, with those at whose ends a run is saved."""
        intervals = {every for every in (self.flush_every or 0, *save_intervals) if every}
        return tuple(sorted(intervals))

    def shared_settings(self, *save_intervals: int) -> dict[str, Any] | None:
        """Return the settings that all members must share; None without rounds."""
        if not self.has_rounds:
            return None
        return {
            "inner_steps": self.inner_steps,
            "rounds_after": self.rounds_after,
            "outer_learning_rate": self.outer_learning_rate,
            "outer_momentum": self.outer_momentum,
            "flush_every": list(self.flush_intervals(*save_intervals)),
        }

    def check_length(self, total_inner: int) -> None:
        """Check that rounds are short enough for a run of so many inner steps.

        Raises:
            InputError: they are not, which says how long a round may be; or none would begin.
        """
        if not self.has_rounds:
            return
        longest = total_inner // MIN_OUTER_STEPS
        if self.inner_steps > longest:
            remedy = f"give at most {longest}, or leave" if longest else "leave"
            raise InputError(
                f"exchange.inner_steps: {self.inner_steps} of the run's {total_inner} steps leave"
                f" fewer than {MIN_OUTER_STEPS} rounds, too few for the outer update; {remedy}"
                " exchange.schedule at steps"
            )
        if self.rounds_after >= total_inner:
            raise InputError(
                f"exchange.rounds_after: the run has {total_inner} steps, so no round would begin"
                f" after {self.rounds_after}; give less, or leave exchange.schedule at steps"
            )


class ExchangeConfig(RoundSettings):
    """How workers and coordinator agree; all durations in seconds."""

    topology: Literal["star", "ring"] = "star"
    """`star`: a coordinator sums gradients; workers may come and go. `ring`: equal workers sum by
    torch.distributed.

    A ring has four or more and is unencrypted; a lost worker ends all."""
    codec: CodecName = "fp32"
    """Encoding of gradients on the network: `fp32`, `bf16`, and for slow links `auto`, `int8` and
    `int4`."""
    split: (
        Literal["measured", "equal"]
        | tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
    ) = "measured"
    """Split of a step's samples: `measured` by speed, `equal`, or a list of weights by rank."""
    hash_every: Positive = 10
    """Steps between proofs that all workers hold the same weights."""
    heartbeat: float = Field(default=0.5, ge=0.001, le=1e9)
    """Seconds between two heartbeats."""
    lost_after: float = Field(default=3.0, gt=0, le=1e9)
    """Seconds of silence after which a member is lost."""
    step_deadline: float = Field(default=5.0, gt=0, le=1e9)
    """Least time limit of a step in seconds; the limit is max(3 x p95, this)."""
    join_deadline: float = Field(default=120.0, gt=0, le=1e9)
    """Seconds without progress to wait for workers, a lost coordinator, a joiner that catches up,
    or a function of a script."""
    alarm_factor: float = Field(default=10.0, gt=1, allow_inf_nan=False)
    """How many times the largest of the last norms a contribution's may be; above, it is an
    outlier."""
    outliers: Literal["report", "halt"] = "report"
    """`report` logs an outlier, `halt` also halts the run before the update, with exit code 5."""
    shared_memory: bool = True
    """Workers on the coordinator's host hand over gradients in shared memory (Linux); false: over
    TCP."""

    @property
    def is_ring(self) -> bool:
        """Whether the topology is a ring."""
        return self.topology == "ring"

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.lost_after <= 2 * self.heartbeat:
            raise ValueError("lost_after must be more than twice heartbeat")
        return self

    def check_worker_count(self, world: int) -> None:
        """Check a number of workers.

        Raises:
            InputError: they are too few for a ring.
        """
        if self.is_ring and world < MIN_RING_SIZE:
            raise InputError(
                f"exchange.topology ring: {world} workers, and a ring has at least {MIN_RING_SIZE}:"
                " a star of fewer is as fast, and continues when one is lost; leave the topology at"
                " star"
            )
