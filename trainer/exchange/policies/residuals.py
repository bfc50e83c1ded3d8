"""The unsent residuals of a run: the coordinator's own, and the norms that members report."""

from __future__ import annotations

from collections.abc import Callable

from trainer.exchange.protocol.codecs import AgreedCodec
from trainer.exchange.protocol.schedule import StepPlan


class Residuals:
    """Reports what a run loses of them; where the codec has no feedback there are none."""

    def __init__(self, codec: AgreedCodec, plan: StepPlan, emit: Callable[..., None]) -> None:
        """Take the codec of the coordinator's averages, and the function that logs events."""
        self._codec, self._plan, self._emit = codec, plan, emit
        self._norms: dict[int, float] = {}

    def all_sent(self, step: int) -> bool:
        """Return whether contributions to a step hold the residuals of many."""
        return self._codec.has_feedback and self._plan.settles(step)

    def reported(self, rank: int, norm: float) -> None:
        """Note the norm of a member's residual after a shard."""
        if self._codec.has_feedback:
            self._norms[rank] = norm

    def lost(self, rank: int, reason: str) -> None:
        """Report a rank's residual as lost: it will not be sent."""
        self._report(rank, self._norms.pop(rank, 0.0), reason)

    def committed(self, *, settled: bool) -> None:
        """After a settled step start from zero; a worker drops what it could not send."""
        if settled:
            for rank in sorted(self._norms):
                self.lost(rank, "it had no share of the settled step")
            self._codec.clear()

    def saved(self, step: int) -> None:
        """Report what the state after `step` updates lacks when a run resumes from it."""
        if self._plan.settles(step - 1):
            return
        reason = "saved between two settled commits: a resumed run begins without it"
        for rank, norm in sorted(self._norms.items()):
            self._report(rank, norm, reason)
        self._report(None, self._codec.norm, reason)

    def _report(self, rank: int | None, norm: float, reason: str) -> None:
        if norm:
            self._emit("residual_lost", rank=rank, norm=norm, reason=reason)
