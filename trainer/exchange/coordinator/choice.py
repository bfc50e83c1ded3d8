"""The settings `exchange.codec: auto` and `exchange.schedule: auto`, decided by measured steps.

The codec is bf16 while a step hides its exchange, else int8. Both cost a run nothing
(docs/low-bandwidth.md has their losses, and those of smaller codecs, which are not free and so
never chosen for a user). A step in bf16 is a settled one: no residual is left after it, so the
codec can change at any ordinary step, in both directions.

The schedule goes from steps to rounds, once and for good, if the smallest codec at hand was
measured and did not hide the exchange either. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainer.config.codec import AUTO
from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.actions import Step
from trainer.exchange.protocol.members import Member
from trainer.exchange.protocol.messages import SHARED_MEMORY
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout
from trainer.planning.devices import LinkRates
from trainer.planning.exchange_choice import (
    EACH_STEP,
    FREE,
    LAST,
    LEAST_ROUNDS,
    MOST_EXPOSED,
    ExchangeCandidate,
    ExchangeLoad,
    element_bytes,
    exposed,
    first_within,
    hiding_rounds,
    rounds_of,
)
from trainer.planning.term import Term, term

_FIRST = 3
"""Steps that are not measured: shares settle, and caches are filled."""
_WINDOW = 10
"""Steps whose medians decide."""
_AGREEING = 2
"""Windows that must say the same before a run goes back to more bytes."""
_AHEAD = 2
"""Steps from a decision to the first round: one is under way, the next is settled."""


@dataclass(frozen=True)
class _Window:
    """Medians over some steps, in seconds."""

    done: int
    """Steps of the run so far."""
    compute: float
    """Of a step, without what the exchange adds."""
    span: float
    """Of the exchange, from the first gradient to the commit."""
    out: float
    """What of it backward did not hide."""


class ExchangeChoice:
    """Measures a run's steps and chooses the codec and the plan of the next ones."""

    def __init__(
        self, settings: ExchangeConfig, layout: GradientLayout, plan: StepPlan, outbox: Outbox
    ) -> None:
        self.plan = plan
        self.codec = FREE[0] if settings.codec == AUTO else settings.codec
        """Of ordinary steps, as a setting."""
        self._codec_is_auto = settings.codec == AUTO
        self._schedule_is_auto = settings.schedule == "auto"
        self._refused = False
        self._layout = layout
        self._outbox = outbox
        self._skip = _FIRST
        self._steps: list[tuple[float, float, float]] = []
        self._hidden: float | None = None
        """Seconds beside backward that the last exchange which was too long for them had."""
        self._larger = 0
        """Windows in a row that a codec of more bytes would have been hidden in."""

    def codec_of(self, step: int) -> str:
        """Return a step's codec, as a setting; rounds take the smallest of those that are free."""
        return FREE[-1] if self._codec_is_auto and self.plan.is_round(step) else self.codec

    def in_bf16(self, step: int) -> bool:
        """Return whether `auto` sends a step in bf16."""
        return self._codec_is_auto and self.codec_of(step) == FREE[0]

    def measured(self, event: Step, members: Iterable[Member]) -> None:
        """Note what a step took, which may decide about the next ones; an event says so.

        Args:
            members: memory that workers share with the coordinator needs no codec.
        """
        if self.plan.rounds and event.step >= self.plan.rounds_after - _AHEAD:
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
        window = _Window(event.step, max(compute, 1e-6), max(span, 1e-6), out)
        remote = any(m.request.transport not in ("", SHARED_MEMORY) for m in members)
        changed = self._codec_is_auto and self._choose_codec(window, remote=remote)
        if self._schedule_is_auto and remote and not changed:
            self._choose_schedule(window)

    def _choose_codec(self, window: _Window, *, remote: bool) -> bool:
        """Return whether another codec is better, and take it."""
        exchange = self._exchange(window)
        candidates = [
            ExchangeCandidate(codec, 1, self._exposed(exchange, codec, window.out))
            for codec in (*EACH_STEP, LAST)
        ]
        free = [one for one in candidates if one.codec in FREE]
        taken = first_within(exchange, free).codec if remote else FREE[0]
        back = FREE.index(taken) < FREE.index(self.codec)
        self._larger = self._larger + 1 if back else 0
        if taken == self.codec or (back and self._larger < _AGREEING):
            return False
        self.codec, self._skip, self._larger = taken, 1, 0
        self._outbox.emit("codec", codec=taken, **_figures(window, candidates))
        return True

    def _choose_schedule(self, window: _Window) -> None:
        """Begin rounds if steps cannot hide the exchange, and rounds that fit the run can."""
        smallest = not self._codec_is_auto or self.codec == FREE[-1]
        if not smallest or window.out <= MOST_EXPOSED * window.compute:
            return
        after = window.done + _AHEAD
        left = self.plan.total_inner - after
        exchange = self._exchange(window, total_steps=max(left, 1))
        now = ExchangeCandidate(self.codec, 1, _measured(window.out))
        found = rounds_of(exchange, self.codec)
        if found is None or not first_within(exchange, [found]).within:
            if not self._refused:
                self._refuse(window, exchange, now)
            return
        self.plan = self.plan.with_rounds((after, found.every))
        same = f"exchange.schedule=rounds exchange.inner_steps={found.every}"
        self._outbox.emit(
            "schedule",
            schedule="rounds",
            inner_steps=found.every,
            rounds_after=after,
            settings=f"exchange.codec={self.codec} {same} exchange.rounds_after={after}",
            **_figures(window, [now, found]),
        )

    def _refuse(self, window: _Window, exchange: ExchangeLoad, now: ExchangeCandidate) -> None:
        """Say once why steps stay, though they do not hide the exchange."""
        self._refused = True
        needed = hiding_rounds(exchange, self.codec)
        self._outbox.emit(
            "schedule",
            schedule="steps",
            reason=f"rounds would need {needed} steps to hide the exchange: {LEAST_ROUNDS} of them"
            f" do not fit the {exchange.total_steps} steps that are left",
            **_figures(window, [now]),
        )

    def _exposed(self, exchange: ExchangeLoad, codec: str, out: float) -> Term:
        return _measured(out) if codec == self.codec else exposed(exchange, codec)

    def _exchange(self, window: _Window, total_steps: int | None = None) -> ExchangeLoad:
        """Return a link that would take as long as the exchange took."""
        if window.out > MOST_EXPOSED * window.compute:  # else backward may have hidden more
            self._hidden = max(window.span - window.out, 0.0)
        rate = element_bytes(self.codec) * self._layout.size / window.span
        return ExchangeLoad(
            link=LinkRates(up=rate, down=rate),
            elements=self._layout.size,
            blocks=len(self._layout.blocks),
            step_seconds=window.compute,
            total_steps=total_steps or self.plan.total_steps,
            hidden=self._hidden,
        )


def _figures(window: _Window, candidates: list[ExchangeCandidate]) -> dict[str, Any]:
    """Return what an event says of a decision, in milliseconds of each step."""
    return {
        "step_ms": round(1e3 * window.compute, 1),
        "exposed_ms": {
            "rounds" if one.every > 1 else one.codec: round(one.exposed_ms, 1) for one in candidates
        },
    }


def _measured(seconds: float) -> Term:
    return term("exposed communication", "measured", "the run itself", measured=seconds)
