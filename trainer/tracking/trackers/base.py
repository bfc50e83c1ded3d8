"""The interface of a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Gets every figure of `metrics.jsonl` as it is written; what it does not show it leaves out.

    `now` is in Unix seconds.
    """

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Record figures by their tags, such as `loss` or `samples/rank_1`."""

    def record_text(self, step: int, now: float, tag: str, content: str) -> None:
        """Record a text."""

    def on_restart(self, step: int, now: float) -> None:
        """Note that the run goes on after `step`: what was recorded of later steps is void."""

    def close(self, exit_code: int = 0) -> None:
        """Record how the run ended, and write what is not yet written."""
