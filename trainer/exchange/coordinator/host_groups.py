"""Workers of one host whose gradients of a step come as one. Pure.

One of them, the carrier, adds up the sums of all in the order of their samples, and sends what
comes out in the place of its own. So the plan of a step says how its sums associate: first within
each group, then over all. Each member keeps its own link for everything else, and whatever goes
wrong dissolves the group: what it still owes is dealt again, without a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.coordinator.outliers import Outliers
from trainer.exchange.protocol.members import Member
from trainer.exchange.protocol.messages import BlockParts, ShardResult
from trainer.exchange.protocol.wire import MAX_WEIGHT
from trainer.model.layout import GradientLayout
from trainer.system.errors import NonFiniteError, ProtocolError


@dataclass(eq=False)
class HostGroup:
    """The shards of one host in one step, in the order of their samples."""

    carrier: Shard
    shards: tuple[Shard, ...]
    announced: dict[int, int] = field(default_factory=dict[int, int])
    """By block the weight of the sum that the carrier said would follow."""
    held: dict[int, tuple[ShardResult, float]] = field(
        default_factory=dict[int, tuple[ShardResult, float]]
    )
    """Results that came before the gradients, and when: they count only behind these."""

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """The (rank, shard) of all, as the carrier adds them up."""
        return tuple((shard.rank, shard.id) for shard in self.shards)

    @property
    def name(self) -> str:
        """The ranks, for a message about the sum of all."""
        return f"the sum of ranks {', '.join(str(shard.rank) for shard in self.shards)}"

    def waits_for(self, shard: Shard) -> bool:
        """Return whether the group waits for a shard's worker.

        A worker whose result is here has handed over everything; once all results are here the
        group waits for its carrier.
        """
        if shard.id not in self.held:
            return True
        return shard == self.carrier and all(other.id in self.held for other in self.shards)

    def agreed_weight(self, shard: Shard, block: int) -> int:
        """Return the weight with which a shard's gradient has to come.

        Raises:
            ProtocolError: it is not the carrier's, or the carrier did not say what is in it.
        """
        if shard != self.carrier:
            raise ProtocolError(f"a gradient of shard {shard.id}, which another rank carries")
        if block not in self.announced:
            raise ProtocolError(f"block {block} of a group came before its parts")
        return self.announced[block]

    def announce(
        self,
        message: BlockParts,
        step: int,
        weights: dict[int, int],
        layout: GradientLayout,
        outliers: Outliers,
    ) -> None:
        """Check what each shard put into a block that follows; `weights` are those of shards.

        Raises:
            ProtocolError: it does not describe the next sum of this group.
            NonFiniteError: a part holds a NaN or Inf.
            OutlierError: a part is far too long, and that is to halt the run.
        """
        if message.block >= len(layout.blocks) or message.block in self.announced:
            raise ProtocolError(f"parts of block {message.block}, which is not due")
        if len(message.parts) != len(self.shards):
            raise ProtocolError(f"{len(message.parts)} parts of {len(self.shards)} shards")
        block = layout.blocks[message.block]
        for shard, part in zip(self.shards, message.parts, strict=True):
            if part.tensor >= len(block.tensors):
                raise ProtocolError(f"tensor {part.tensor} of {len(block.tensors)}")
            if part.weight != weights.setdefault(shard.id, part.weight):
                raise ProtocolError(f"shard {shard.id}: its blocks differ in weight")
            tensor = block.tensors[part.tensor].name
            if part.norm is None:
                raise NonFiniteError.at(
                    step + 1,
                    f"rank {shard.rank} handed over a value that is not finite in block"
                    f" {block.name}, tensor {tensor}",
                )
            outliers.check_norm(
                shard.rank, step, block, part.norm, part.weight, lambda name=tensor: name
            )
        self.announced[message.block] = min(sum(p.weight for p in message.parts), MAX_WEIGHT)


def form_groups(shards: Sequence[Shard], members: Iterable[Member]) -> dict[int, HostGroup]:
    """Return by shard the group that it belongs to; a shard without others has none."""
    mine = {shard.rank: shard for shard in shards}
    carriers = {member.rank: member.carrier for member in members if member.rank in mine}
    found: dict[int, list[Shard]] = {}
    for rank, carrier in carriers.items():
        if carrier is not None and carriers.get(carrier, carrier) is None:
            found.setdefault(carrier, [mine[carrier]]).append(mine[rank])
    groups: dict[int, HostGroup] = {}
    for carrier, together in found.items():
        ordered = tuple(sorted(together, key=lambda shard: shard.start))
        group = HostGroup(mine[carrier], ordered)
        groups.update((shard.id, group) for shard in ordered)
    return groups
