"""The actions that the coordinator's state machine requests from its shell, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.exchange.protocol.wire import Frame
from trainer.optimizer.adamw import SavedState
from trainer.optimizer.early_stopping import ValidationHistory


@dataclass(frozen=True)
class Send:
    """Queue frames on a link; they are produced only as the link takes them."""

    link: int
    frames: Iterable[Frame]
    if_idle: bool = False
    """Leave them out while anything is queued: what is queued is a heartbeat too."""


@dataclass(frozen=True)
class Close:
    """Close a link after what is queued on it was sent."""

    link: int
    reason: str
    notified: bool = False
    """The last message announces it: then the peer closes, once it has read that."""


@dataclass(frozen=True)
class ApplyUpdate:
    """Call `Coordinator.apply_update`, once everything before this was handed to the network.

    The workers compute their next shard while the coordinator applies the same update. An event may
    come first: it finds the update applied.
    """


@dataclass(frozen=True, eq=False)
class Save:
    """Write a checkpoint; `validation` holds loss and, for classes, accuracy and mcc."""

    snapshot: SavedState
    generation: int
    validation: dict[str, Any] | None
    stream: dict[str, Any] | None = None
    """Where a student stands in its folder of logits."""
    early: ValidationHistory | None = None
    """Counters of early stopping."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Event published when a step is committed."""

    step: int
    """Applied updates, this one included."""
    epoch: int
    generation: int
    loss: float | None
    """Mean over samples or tokens; None if no token of the step was learned."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    tokens_per_second: float
    exchange_ms: float = 0.0
    """From the slowest worker's first gradient to the commit."""
    exchange_bytes: int = 0
    worker_tokens_per_second: Mapping[int, float] = field(default_factory=dict[int, float])
    worker_seconds: Mapping[int, float] | None = None
    """By rank, what its forward and backward took."""
    worker_overlap_seconds: Mapping[int, float] | None = None
    """By rank, the end of `worker_seconds` from its first gradient on: exchange that is hidden."""
    worker_samples: Mapping[int, int] = field(init=False)
    """Samples by rank."""
    exchange_exposed_ms: float = 0.0
    """Part of `exchange_ms` that was not hidden behind backward: the step's time beyond the slowest
    worker's computing."""
    sample_ranges: Sequence[Sequence[int]]
    """The samples that counted, as [rank, start, stop] in the epoch's order: the ledger."""
    ce: float | None = None
    """Mean cross-entropy of a student with the text, in nats."""
    kl: float | None = None
    """Mean divergence of a student from its teacher, in nats."""
    on_policy_kl: float | None = None
    """The same on the student's own answers; `ce` and `kl` are then of the corpus alone."""
    alpha: float | None = None
    teacher_wait_seconds: float | None = None
    """How long a student waited for its teacher before this step."""
    generation_seconds: float | None = None
    """How long it wrote answers of its own before this step, which no other seconds contain."""
    seconds: float
    codec: str | None = None
    inner_steps: int | None = None
    """The inner steps of a round."""
    watts: Mapping[int, float] = field(default_factory=dict[int, float])
    """The power of a rank's host, where that is measured."""

    def __post_init__(self) -> None:
        samples: dict[int, int] = {}
        for rank, start, stop in self.sample_ranges:
            samples[rank] = samples.get(rank, 0) + stop - start
        object.__setattr__(self, "worker_samples", samples)


@dataclass(frozen=True)
class Emit:
    """Log an event: a validation or a change of membership."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Finish:
    """The run is over; leave with this exit code once all saves are done."""

    exit_code: int
    reason: str


Action = Send | Close | ApplyUpdate | Save | Step | Emit | Finish
