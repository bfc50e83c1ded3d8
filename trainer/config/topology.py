"""The connection of a run's members: a star around a coordinator, or a ring."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from trainer.config.rounds import RoundSettings
from trainer.system.errors import InputError

FEWEST = 4
"""Workers of a ring."""
RING_NOTE = (
    "a ring is not elastic: a lost rank ends all, which start again at the newest checkpoint; and"
    " it is not encrypted: its network must be one you trust"
)
"""What is said at the start of each."""
_STAR_ONLY: dict[str, tuple[Any, str]] = {
    "codec": ("fp32", "sums without a coordinator, and nothing decodes on the way"),
    "schedule": ("steps", "has no coordinator, which rounds need"),
    "sum_on_host": (False, "sums between neighbours already"),
}


class TopologySettings(RoundSettings):
    """The topology that sums the gradients; see docs/strategies.md, "Ring"."""

    topology: Literal["star", "ring"] = "star"
    """`star`: a coordinator sums, workers may differ, come and go. `ring`: four or more equal
    workers sum among themselves by torch.distributed, unencrypted; a lost one ends all."""

    @property
    def in_ring(self) -> bool:
        """Whether the topology is a ring."""
        return self.topology == "ring"

    @model_validator(mode="after")
    def _suits_a_ring(self) -> Self:
        for name, (only, why) in _STAR_ONLY.items():
            if self.in_ring and getattr(self, name, only) != only:
                raise ValueError(f"{name} must be {only} with topology ring, which {why}")
        if self.in_ring and not isinstance(getattr(self, "shares", ""), str):
            raise ValueError("shares must not be a list with topology ring: its workers are equal")
        return self

    def check_whole_models(self, *, plain: bool, distilled: bool) -> None:
        """Check that each worker of a ring trains a whole model on samples.

        Args:
            plain: the section `parallel` shares no model.

        Raises:
            ValueError: it does not.
        """
        if self.in_ring and not plain:
            raise ValueError(
                "exchange.topology ring needs a whole model on each worker: leave parallel out, or"
                " start its processes with torchrun and without the topology"
            )
        if self.in_ring and distilled:
            raise ValueError(
                "exchange.topology ring trains on samples, not on a teacher's logits: leave it at"
                " star"
            )

    def check_star(self) -> None:
        """Check that a process which is no rank can follow the settings.

        Raises:
            InputError: they ask for a ring.
        """
        if self.in_ring:
            raise InputError(
                "exchange.topology ring: it has no coordinator, no worker that joins later, and at"
                f" least {FEWEST} ranks; start them all with `launch cluster up`, or with `torchrun"
                f" --nproc-per-node {FEWEST} -m trainer finetune --distributed`"
            )

    def check_size(self, world: int) -> None:
        """Check a number of workers.

        Raises:
            InputError: they are too few for a ring.
        """
        if self.in_ring and world < FEWEST:
            raise InputError(
                f"exchange.topology ring: {world} workers, and a ring has at least {FEWEST}: a star"
                " of fewer is as fast, and goes on when one is lost; leave the topology at star"
            )
