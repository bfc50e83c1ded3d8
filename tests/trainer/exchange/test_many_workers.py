"""A step's cost at the coordinator grows with the workers, not with their square."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from trainer.exchange import coordinator

HERE = coordinator.__path__[0]


def calls_in_a_run(workers: int) -> int:
    """Return the calls of the coordinator's functions in a run of six steps."""
    problem = ExactProblem(
        samples=3 * workers,
        validation_samples=0,
        training__batch_size=workers,
        training__evaluate_every=0,
        checkpoint__every=100,
    )
    cluster = SimulatedCluster(problem, workers=workers)
    calls = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(HERE)

    sys.setprofile(count)
    try:
        cluster.run_to_end()
    finally:
        sys.setprofile(None)
    assert len(cluster.named("step")) == 6
    return calls


def test_four_times_the_workers_take_four_times_the_calls() -> None:
    assert calls_in_a_run(64) < 4.4 * calls_in_a_run(16)
