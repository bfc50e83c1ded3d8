"""Wait until eval runners have scored every checkpoint of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.evaluate.claims import Claims, ClaimState
from trainer.evaluate.results import EVALUATIONS
from trainer.evaluate.watcher import WatchedRun
from trainer.system.process.heartbeat import HeartbeatMonitor

PATIENCE = 120.0
"""Seconds without a sign of a living runner after which the run stops waiting for it."""
_LOOK = 0.5

log = logging.getLogger(__name__)


def await_scores(
    output: Path,
    over: Callable[[], bool],
    on_progress: Callable[[], None],
    patience: float = PATIENCE,
) -> None:
    """Return once each checkpoint has a result, `over` says so, or no runner lives.

    Args:
        output: the folder that runners watch.
        on_progress: called after each result.
    """
    run, claims = WatchedRun(output), Claims(output / EVALUATIONS / "claims", "", patience)
    states: dict[str, ClaimState] = {}
    silence = HeartbeatMonitor()
    while not over():
        with suppress(OSError):  # an unreachable share: it may return
            found = claims.read_states()
            if _finished_digests(found) != _finished_digests(states):
                on_progress()
            states = found
            if {checkpoint.digest for checkpoint in run.list_checkpoints()} <= _finished_digests(
                states
            ):
                return
        if silence.observe(states) >= patience:
            log.warning("%s: no eval runner is running, so none is waited for", output)
            return
        time.sleep(_LOOK)


def _finished_digests(states: dict[str, ClaimState]) -> set[str]:
    return {digest for digest, state in states.items() if state.record is not None}
