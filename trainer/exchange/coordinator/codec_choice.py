"""The setting `exchange.codec: auto`: bf16 while a step hides its exchange, else int8.

Both cost a run nothing (docs/low-bandwidth.md has their losses, and those of smaller codecs, which
are not free and so never chosen for a user). A step in bf16 is a settled one: nothing is owed after
it, so the codec can change at any step, in both directions. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.layout import GradientLayout
from trainer.planning.devices import Link
from trainer.planning.exchange_choice import (
    EACH_STEP,
    FREE,
    LAST,
    MOST_EXPOSED,
    Candidate,
    Exchange,
    element_bytes,
    exposed,
    first_within,
)
from trainer.planning.term import Term, term

_FIRST = 3
"""Steps that are not measured: shares settle, and caches are filled."""
_WINDOW = 10
"""Steps whose medians decide."""
_AGREEING = 2
"""Windows that must say the same before a run goes back to more bytes."""


class CodecChoice:
    """Measures a run's steps and says which codec the next ones take."""

    def __init__(self, layout: GradientLayout, plan: StepPlan) -> None:
        self.codec = FREE[0]
        self._layout = layout
        self._plan = plan
        self._skip = _FIRST
        self._window: list[tuple[float, float, float]] = []
        self._hidden: float | None = None
        """Seconds beside backward that the last exchange which was too long for them had."""
        self._larger = 0
        """Windows in a row that a codec of more bytes would have been hidden in."""

    def measured(self, step: Mapping[str, Any], *, remote: bool) -> dict[str, Any] | None:
        """Take in what a step took; return the figures that changed the codec, or None.

        Args:
            step: `seconds`, `exchange_ms` and `exchange_exposed_ms`, as the event of a step.
            remote: whether a worker is reached over a network: shared memory needs no codec.
        """
        if self._skip:
            self._skip -= 1
            return None
        span, out = 1e-3 * step["exchange_ms"], 1e-3 * step["exchange_exposed_ms"]
        self._window.append((step["seconds"] - out, span, out))
        if len(self._window) < _WINDOW:
            return None
        compute, span, out = (median(column) for column in zip(*self._window, strict=True))
        self._window.clear()
        exchange = self._exchange(compute, span, out)
        candidates = [
            Candidate(codec, 1, _measured(out) if codec == self.codec else exposed(exchange, codec))
            for codec in (*EACH_STEP, LAST)
        ]
        free = [one for one in candidates if one.codec in FREE]
        taken = first_within(exchange, free).codec if remote else FREE[0]
        back = FREE.index(taken) < FREE.index(self.codec)
        self._larger = self._larger + 1 if back else 0
        if taken == self.codec or (back and self._larger < _AGREEING):
            return None
        self.codec, self._skip, self._larger = taken, 1, 0
        return {
            "codec": taken,
            "step_ms": round(1e3 * compute, 1),
            "exposed_ms": {one.codec: round(one.exposed_ms, 1) for one in candidates},
        }

    def _exchange(self, compute: float, span: float, out: float) -> Exchange:
        """Return a link that would take as long as the exchange took."""
        if out > MOST_EXPOSED * compute:  # else backward may have hidden more than there was
            self._hidden = max(span - out, 0.0)
        rate = element_bytes(self.codec) * self._layout.size / max(span, 1e-6)
        return Exchange(
            link=Link(up=rate, down=rate),
            elements=self._layout.size,
            blocks=len(self._layout.blocks),
            step_seconds=max(compute, 1e-6),
            total_steps=self._plan.total_steps,
            hidden=self._hidden,
        )


def _measured(seconds: float) -> Term:
    return term("exposed communication", seconds, "measured", "the run itself", measured=seconds)
