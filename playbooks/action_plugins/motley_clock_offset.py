"""How far a host's clock is from this machine's: the quickest of a few questions over SSH."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase

QUESTIONS = 5


def best_offset(samples: list[tuple[float, float, float]]) -> dict[str, float]:
    """(asked, host's time, answered) -> seconds the host is ahead, give or take `uncertainty`.

    The host looked at its clock somewhere between asking and answering; the quickest exchange
    bounds it best.
    """
    asked, remote, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    return {
        "offset": round(remote - (asked + answered) / 2, 4),
        "uncertainty": round((answered - asked) / 2, 4),
    }


class ActionModule(ActionBase):
    """Changes nothing, so it also runs in check mode."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset()
    _supports_check_mode = True

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return `offset` and `uncertainty` in seconds."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        samples: list[tuple[float, float, float]] = []
        for _ in range(QUESTIONS):
            asked = time.time()
            answer = self._low_level_execute_command("date +%s.%N", sudoable=False)
            answered = time.time()
            lines = answer["stdout"].split()
            if answer["rc"] == 0 and lines:
                samples.append((asked, float(lines[-1]), answered))
        if not samples:
            return {**result, "failed": True, "msg": "the host does not tell its time"}
        return {**result, "changed": False, **best_offset(samples)}
