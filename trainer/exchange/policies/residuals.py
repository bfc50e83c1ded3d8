"""The unsent residuals of a run: the coordinator's own, and the norms that members report."""

from __future__ import annotations

from collections.abc import Callable

from trainer.exchange.protocol.codecs import SenderCodec
from trainer.exchange.protocol.schedule import StepPlan


class Residuals:
    """Reports what a run loses of them; where the codec has no feedback there are none."""

    def __init__(self, codec: SenderCodec, plan: StepPlan, emit: Callable[..., None]) -> None:
        """Take the codec of the coordinator's averages, and the function that logs events."""
        self._codec, self._plan, self._emit = codec, plan, emit
        self._norms: dict[int, float] = {}

    def has_residuals(self, step: int) -> bool:
        """Return whether contributions to a step hold the residuals of many."""
        return self._codec.has_feedback and self._plan.flushes_residuals(step)

    def record_norm(self, rank: int, norm: float) -> None:
        """Record the norm of a member's residual after a shard."""
        if self._codec.has_feedback:
            self._norms[rank] = norm

    def report_lost(self, rank: int, reason: str) -> None:
        """Report a rank's residual as lost: it will not be sent."""
        self._emit_lost(rank, self._norms.pop(rank, 0.0), reason)

    def record_commit(self, *, settled: bool) -> None:
        """Reset all norms after a settled step; a worker drops a residual it could not send."""
        if settled:
            for rank in sorted(self._norms):
                self.report_lost(rank, "it had no share of the settled step")
            self._codec.clear_residuals()

    def record_save(self, step: int) -> None:
        """Report the residuals that a run loses when it resumes from the state after `step`."""
        if self._plan.flushes_residuals(step - 1):
            return
        reason = "saved between two settled commits: a resumed run begins without it"
        for rank, norm in sorted(self._norms.items()):
            self._emit_lost(rank, norm, reason)
        self._emit_lost(None, self._codec.norm, reason)

    def _emit_lost(self, rank: int | None, norm: float, reason: str) -> None:
        if norm:
            self._emit("residual_lost", rank=rank, norm=norm, reason=reason)
