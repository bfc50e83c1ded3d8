"""The actions that the coordinator's state machine requests from its shell, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.exchange.protocol.wire import Frame
from trainer.optimizer.adamw import SavedState


@dataclass(frozen=True)
class Send:
    """Queue frames on a link; they are produced only as the link takes them."""

    link: int
    frames: Iterable[Frame]
    if_idle: bool = False
    """Leave them out while anything is queued: what is queued is a sign of life too."""


@dataclass(frozen=True)
class Close:
    """Close a link after what is queued on it was sent."""

    link: int
    reason: str
    told: bool = False
    """Whether the last message says so: then the peer closes, once it has read that."""


@dataclass(frozen=True)
class Settle:
    """Call `Coordinator.settle`, once everything before this was handed to the network.

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
    rounds: tuple[int, int] | None = None
    """The plan's, as far as they are known."""


@dataclass(frozen=True)
class Emit:
    """Something to log: a step, a validation or a membership event."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Finish:
    """The run is over; leave with this exit code once all saves are done."""

    exit_code: int
    reason: str


Action = Send | Close | Settle | Save | Emit | Finish
