"""What happens in a run while its live view looks: changes from one look to the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.runs.status import RunView
from trainer.tracking.picture import figure

_KEPT = 5


class EventFeed:
    """The last events, each with its local time, the newest last."""

    def __init__(self, now: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._now = now
        self._known: dict[str, str] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def seen(self, view: RunView) -> tuple[str, ...]:
        """Take a look into account; return the last events."""
        facts = dict(_facts(view))
        before = self._known
        if before is not None:
            self._lines.extend(
                f"{self._now()} {text}" for key, text in facts.items() if before.get(key) != text
            )
        self._known = {**(before or {}), **facts}  # what is not said for a while did not change
        return tuple(self._lines)


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield what changes seldom, by what it is about, in words."""
    yield "run", f"the run is {view.outcome}"
    for process in view.run.plan.processes:
        state, member = view.processes[process.name], view.member(process)
        attempt = f", attempt {state.attempt}" if state.attempt > 1 else ""
        ending = f" ({state.ending})" if state.ending and state.exit_code != 0 else ""
        yield process.name, f"{process.name}: {state.state}{ending}{attempt}"
        if process.role == "worker" and state.state == "running" and member.get("state"):
            yield f"{process.name}/member", f"{process.name}: {member['state']}"
    training: Mapping[str, Any] = view.training or {}
    if validation := training.get("validation"):
        scores = (
            figure("loss", validation.get("loss"), ".4f"),
            figure("accuracy", validation.get("accuracy"), ".3f"),
        )
        said = ", ".join(filter(None, scores))
        yield "validation", f"validation at step {validation.get('step')}: {said}"
    if checkpoint := training.get("checkpoint"):
        yield "checkpoint", f"checkpoint of step {checkpoint.get('step')}"
