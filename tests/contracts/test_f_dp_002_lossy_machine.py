"""F-DP-001 and F-DP-002 with lossy codecs under Hypothesis: equal bits, everything accounted for.

The faults are those of `test_f_dp_001_002_006_machine.py`; what must hold is in `LossyCluster`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.contracts.test_f_dp_001_002_006_machine import FUZZ, ExchangeUnderFaults
from tests.trainer.exchange.lossy_cluster import LossyCluster, LossyProblem

pytestmark = pytest.mark.usefixtures("small_frames")


@cache
def problem(codec: str, shares: str, schedule: str = "steps") -> LossyProblem:
    """Return a run of six steps, or of three and four rounds."""
    rounds: dict[str, Any] = {"exchange__schedule": "rounds", "exchange__inner_steps": 2}
    rounds |= {"exchange__rounds_after": 3, "training__batch_size": 4}
    rounds |= {"training__evaluate_every": 0}
    return LossyProblem(
        samples=20,
        method="full",
        exchange__codec=codec,
        exchange__split=shares,
        checkpoint__every=3,
        **(rounds if schedule == "both" else {}),
    )


class LossyExchangeUnderFaults(ExchangeUnderFaults):
    """The same members and faults, with what each of them owes."""

    @initialize(
        codec=st.sampled_from(["auto", "int8", "int4"]),
        shares=st.sampled_from(["equal", "measured"]),
        careless=st.booleans(),
        schedule=st.sampled_from(["steps", "both"]),
    )
    def begin(self, codec: str, shares: str, careless: bool, schedule: str) -> None:
        self.cluster = LossyCluster(problem(codec, shares, schedule), workers=4, expect=3)
        self.cluster.workers[3].alive = False
        for worker in self.cluster.workers:
            worker.careless = careless
            worker.seconds_per_sample = 0.01 * (1 + 3 * (worker.request.rank or 0))


LossyExchangeUnderFaults.TestCase.settings = settings(
    max_examples=FUZZ or 60,
    stateful_step_count=60 if FUZZ else 40,
    derandomize=not FUZZ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLossyExchangeUnderFaults = LossyExchangeUnderFaults.TestCase
