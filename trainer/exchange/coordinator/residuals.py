"""The unsent residuals of a run: the coordinator's own, and the norms that members report."""

from __future__ import annotations

from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.choice import ExchangeChoice
from trainer.exchange.coordinator.gradient_sum import GradientSum, SumMemory
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.compression.choice import AgreedCodec
from trainer.model.layout import GradientLayout


class Residuals:
    """The feedback of averages, and the norm of each rank's residual; reports lost residuals."""

    def __init__(
        self,
        settings: ExchangeConfig,
        layout: GradientLayout,
        choice: ExchangeChoice,
        outbox: Outbox,
    ) -> None:
        self.wire_layout = layout.doubled if settings.has_rounds else layout
        """What the most blocks of a step are of: second moments come with a settled round."""
        self.codec = AgreedCodec(settings.codec, self.wire_layout)
        self.own = self.codec.feedback()
        """What averages owe; None where the codec needs no feedback."""
        self.memory = SumMemory(layout)
        """What the sums of all steps are made in."""
        self._choice = choice
        self._owed: dict[int, float] = {}
        self._layout = layout
        self._outbox = outbox

    def all_sent(self, step: int) -> bool:
        """Return whether contributions to a step hold what was owed of many."""
        return self.own is not None and self._choice.plan.settles(step)

    def sums(self, step: int) -> GradientSum:
        """Return what takes the contributions to a step, and makes averages of them."""
        plan = self._choice.plan
        settles = plan.settles(step)
        doubled = settles and plan.is_round(step)
        return GradientSum(
            self._layout,
            self.codec,
            step,
            self.own,
            settled=settles or self._choice.in_bf16(step),
            second_moments=doubled,
            memory=None if doubled else self.memory,
        )

    def reported(self, rank: int, norm: float) -> None:
        """Note what a member owes after a shard."""
        if self.own:
            self._owed[rank] = norm

    def lost(self, rank: int, reason: str) -> None:
        """Report what a rank owes as lost: it will not be sent."""
        self._say(rank, self._owed.pop(rank, 0.0), reason)

    def committed(self, sums: GradientSum) -> None:
        """After a settled step start from zero; a worker drops what it could not send."""
        if self.own and sums.settled:
            for rank in sorted(self._owed):
                self.lost(rank, "it had no share of the settled step")
            self.own.clear()

    def saved(self, step: int) -> None:
        """Say what the state after `step` updates lacks when a run resumes from it."""
        if self.own is None or self._choice.plan.settles(step - 1):
            return
        reason = "saved between two settled commits: a resumed run begins without it"
        for rank, norm in sorted(self._owed.items()):
            self._say(rank, norm, reason)
        self._say(None, self.own.norm, reason)

    def _say(self, rank: int | None, norm: float, reason: str) -> None:
        if norm:
            self._outbox.emit("residual_lost", rank=rank, norm=norm, reason=reason)
