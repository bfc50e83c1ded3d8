"""F-DP-001, F-DP-002 and F-DP-006 under Hypothesis: any order of faults, always the same weights.

The run of the test suite takes the same examples every time. To search for new ones:

    MOTLEY_FUZZ_EXAMPLES=5000 pytest --timeout 0 tests/contracts/test_f_dp_001_002_006_machine.py
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.misbehaviour import MISBEHAVIOUR
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from trainer.system.errors import UnprovedError

pytestmark = pytest.mark.usefixtures("small_frames")

FUZZ = int(os.environ.get("MOTLEY_FUZZ_EXAMPLES", "0"))
"""Examples of a long random search; 0 for the fixed ones."""

RANKS = st.integers(0, 3)
BYTES = st.one_of(st.none(), st.integers(0, 400))


@cache
def problem(codec: str, shares: str, schedule: str) -> ExactProblem:
    """Return a run of six steps, or of five rounds of two inner steps, two of them flushes.

    Or of three steps and four rounds.
    """
    settings: dict[str, Any] = {"exchange__codec": codec, "exchange__split": shares}
    if schedule != "steps":
        settings |= {"exchange__schedule": "rounds", "exchange__inner_steps": 2}
        settings |= {"training__batch_size": 4, "training__evaluate_every": 0}
    if schedule == "both":
        settings["exchange__rounds_after"] = 3
    return ExactProblem(samples=20, **settings)


class ExchangeUnderFaults(RuleBasedStateMachine):
    """Three workers from the start, a fourth that comes late, and everything that can go wrong."""

    cluster: SimulatedCluster

    @initialize(
        codec=st.sampled_from(["fp32", "bf16"]),
        shares=st.sampled_from(["equal", "measured"]),
        careless=st.booleans(),
        schedule=st.sampled_from(["steps", "rounds", "both"]),
    )
    def begin(self, codec: str, shares: str, careless: bool, schedule: str) -> None:
        self.cluster = SimulatedCluster(problem(codec, shares, schedule), workers=4, expect=3)
        self.cluster.workers[3].alive = False
        for worker in self.cluster.workers:
            worker.careless = careless
            worker.seconds_per_sample = 0.01 * (1 + 3 * (worker.request.rank or 0))

    @property
    def serving(self) -> bool:
        return self.cluster.coordinator is not None and self.cluster.finish is None

    # What goes well

    @rule(rank=RANKS)
    def connect(self, rank: int) -> None:
        self.cluster.connect(self.cluster.workers[rank])

    @rule(rank=RANKS, count=BYTES)
    def deliver_up(self, rank: int, count: int | None) -> None:
        if self.serving:
            self.cluster.deliver_up(self.cluster.workers[rank], count)

    @rule(rank=RANKS, count=BYTES)
    def deliver_down(self, rank: int, count: int | None) -> None:
        self.cluster.deliver_down(self.cluster.workers[rank], count)

    @rule(rank=RANKS, pieces=st.integers(1, 6))
    def work(self, rank: int, pieces: int) -> None:
        worker = self.cluster.workers[rank]
        for _ in range(pieces):
            if worker.present:
                worker.step()

    @rule(pieces=st.integers(1, 12))
    def everyone_goes_on(self, pieces: int) -> None:
        self.cluster.go_on(pieces)

    @rule(seconds=st.sampled_from([0.125, 0.5, 2.0, 4.0, 7.0]), flowing=st.booleans())
    def time_passes(self, seconds: float, flowing: bool) -> None:
        if self.serving:
            self.cluster.pass_time(seconds, flowing)

    # Faults of workers and links

    @rule(rank=RANKS, count=BYTES, silent=st.booleans())
    def worker_dies(self, rank: int, count: int | None, silent: bool) -> None:
        worker = self.cluster.workers[rank]
        if worker.alive and self.serving:
            self.cluster.kill(worker, count, silent)

    @rule(rank=RANKS)
    def worker_returns(self, rank: int) -> None:
        worker = self.cluster.workers[rank]
        if worker.gone and worker.wire is None:
            self.cluster.revive(worker)

    @rule(rank=RANKS)
    def worker_is_stopped(self, rank: int) -> None:
        self.cluster.workers[rank].stalled = self.cluster.workers[rank].alive

    @rule(rank=RANKS)
    def worker_continues(self, rank: int) -> None:
        self.cluster.workers[rank].stalled = False

    @rule(rank=RANKS, count=st.integers(0, 400))
    def connection_breaks(self, rank: int, count: int) -> None:
        if self.serving:
            self.cluster.drop(self.cluster.workers[rank], count)

    @rule(rank=RANKS, mute=st.booleans())
    def worker_keeps_its_proofs_to_itself(self, rank: int, mute: bool) -> None:
        self.cluster.workers[rank].mute = mute

    @rule(rank=RANKS, early=st.booleans())
    def worker_hands_in_early(self, rank: int, early: bool) -> None:
        self.cluster.workers[rank].hands_in_early = early

    @rule(rank=RANKS, kind=st.sampled_from(sorted(MISBEHAVIOUR)))
    def worker_misbehaves(self, rank: int, kind: str) -> None:
        worker = self.cluster.workers[rank]
        if self.serving and worker.present and worker.rank is not None:
            MISBEHAVIOUR[kind](self.cluster, worker)

    # Faults of the coordinator

    @precondition(lambda self: self.serving)
    @rule(count=st.integers(0, 200))
    def coordinator_dies(self, count: int) -> None:
        self.cluster.kill_coordinator(count)

    @precondition(lambda self: not self.serving)
    @rule()
    def coordinator_returns(self) -> None:
        self.cluster.coordinator = None
        self.cluster.start_coordinator()

    @rule()
    def run_is_stopped(self) -> None:
        self.cluster.stop()

    # What must hold

    @invariant()
    def f_dp_001_and_002(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()
            if finish := self.cluster.finish:
                assert finish.exit_code in (0, 3, UnprovedError.exit_code), finish

    def teardown(self) -> None:
        """F-DP-006: once the faults are over, the run reaches its last step."""
        if hasattr(self, "cluster"):
            self.cluster.run_to_end()
            steps = self.cluster.problem.plan.total_steps
            assert self.cluster.saves[-1].snapshot.step == steps
            assert {event["step"] for event in self.cluster.named("step")} == set(
                range(1, steps + 1)
            )


ExchangeUnderFaults.TestCase.settings = settings(
    max_examples=FUZZ or 200,
    stateful_step_count=60 if FUZZ else 40,
    derandomize=not FUZZ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestExchangeUnderFaults = ExchangeUnderFaults.TestCase
