"""The setting `exchange.codec: auto`, decided by measured steps. Pure.

The codec is bf16 while a step hides its exchange, else int8. Both cost a run nothing
(docs/low-bandwidth.md has their losses), and neither keeps anything for a later step, so the codec
can change at any ordinary step, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from trainer.config.codec import AUTO, FREE
from trainer.config.exchange import ExchangeConfig
from trainer.exchange.protocol.actions import Step
from trainer.exchange.protocol.members import Member
from trainer.exchange.protocol.messages import SHARED_MEMORY
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout
from trainer.planning.devices import LinkRates
from trainer.planning.exchange_choice import (
    MOST_EXPOSED,
    ExchangeCandidate,
    ExchangeLoad,
    choose_first_fitting,
    element_bytes,
    exposed_seconds,
)
from trainer.planning.term import Term, term

_FIRST = 3
"""Steps that are not measured: assignments converge, and caches are filled."""
_WINDOW = 10
"""Steps whose medians decide."""
_AGREEING = 2
"""Windows that must say the same before a run goes back to more bytes."""


@dataclass(frozen=True)
class _Window:
    """Medians over some steps, in seconds."""

    compute: float
    """Seconds of a step, without what the exchange adds."""
    span: float
    """Seconds of the exchange, from the first gradient to the commit."""
    out: float
    """Seconds of it that backward did not hide."""


class CodecChoice:
    """Measures a run's steps and chooses the codec of the next ones."""

    def __init__(
        self,
        settings: ExchangeConfig,
        layout: GradientLayout,
        plan: StepPlan,
        emit: Callable[..., None],
    ) -> None:
        self.plan = plan
        self.codec = FREE[0] if settings.codec == AUTO else settings.codec
        """Codec of ordinary steps, as a setting."""
        self._is_auto = settings.codec == AUTO
        self._layout = layout
        self._emit = emit
        self._skip = _FIRST
        self._steps: list[tuple[float, float, float]] = []
        self._hidden: float | None = None
        """Seconds beside backward that the last exchange which was too long for them had."""
        self._larger = 0
        """Windows in a row that a codec of more bytes would have been hidden in."""

    def find_codec(self, step: int) -> str:
        """Return a step's codec, as a setting; rounds take the smallest of those that are free."""
        return FREE[-1] if self._is_auto and self.plan.is_outer_step(step) else self.codec

    def is_bf16(self, step: int) -> bool:
        """Return whether `auto` sends a step in bf16."""
        return self._is_auto and self.find_codec(step) == FREE[0]

    def record_step(self, event: Step, members: Iterable[Member]) -> None:
        """Record the times of a step, which may change the codec of the next.

        Args:
            members: memory that workers share with the coordinator needs no codec.
        """
        if not self._is_auto or self.plan.is_outer_step(event.step + 1):  # the next is under way
            return
        if self._skip:
            self._skip -= 1
            return
        span, out = 1e-3 * event.exchange_ms, 1e-3 * event.exchange_exposed_ms
        self._steps.append((event.seconds - out, span, out))
        if len(self._steps) < _WINDOW:
            return
        compute, span, out = (median(column) for column in zip(*self._steps, strict=True))
        self._steps.clear()
        window = _Window(max(compute, 1e-6), max(span, 1e-6), out)
        remote = any(m.request.transport not in ("", SHARED_MEMORY) for m in members)
        self._choose_codec(window, remote=remote)

    def _choose_codec(self, window: _Window, *, remote: bool) -> None:
        """Change to another codec if it is better."""
        exchange = self._estimate_load(window)
        candidates = [
            ExchangeCandidate(codec, 1, self._estimate_exposed(exchange, codec, window.out))
            for codec in FREE
        ]
        taken = choose_first_fitting(exchange, candidates).codec if remote else FREE[0]
        back = FREE.index(taken) < FREE.index(self.codec)
        self._larger = self._larger + 1 if back else 0
        if taken == self.codec or (back and self._larger < _AGREEING):
            return
        self.codec, self._skip, self._larger = taken, 1, 0
        exposed_ms = {one.codec: round(one.exposed_ms, 1) for one in candidates}
        step_ms = round(1e3 * window.compute, 1)
        self._emit("codec", codec=taken, step_ms=step_ms, exposed_ms=exposed_ms)

    def _estimate_exposed(self, exchange: ExchangeLoad, codec: str, out: float) -> Term:
        return _measured_term(out) if codec == self.codec else exposed_seconds(exchange, codec)

    def _estimate_load(self, window: _Window) -> ExchangeLoad:
        """Return a link that would take as long as the exchange took."""
        if window.out > MOST_EXPOSED * window.compute:  # else backward may have hidden more
            self._hidden = max(window.span - window.out, 0.0)
        rate = element_bytes(self.codec) * self._layout.size / window.span
        return ExchangeLoad(
            link=LinkRates(up=rate, down=rate),
            elements=self._layout.size,
            blocks=len(self._layout.blocks),
            step_seconds=window.compute,
            total_steps=self.plan.total_steps,
            hidden=self._hidden,
        )


def _measured_term(seconds: float) -> Term:
    return term("exposed communication", "measured", "the run itself", measured=seconds)
