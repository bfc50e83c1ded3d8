"""Whatever a member sends that makes no sense ends its membership, and nothing else."""

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.misbehaviour import MISBEHAVIOUR
from tests.trainer.exchange.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.usefixtures("small_frames")

REASONS = {
    "an old generation": "HEARTBEAT of generation 2, not 3",
    "another's shard": "shard 0 is not assigned to rank 2",
    "an unknown shard": "shard 2147483648 is not assigned to rank 2",
    "another step": "a gradient of step 1, which is not in progress",
    "another rank": "a gradient of step 0, which is not in progress",
    "a block that is not there": "block 4000 of 4",
    "another codec": "received codec 9, expected fp32",
    "a gap in a block": "block 0: bytes 8..24 came, 0 of 40 are here",
    "an empty piece": "block 0: bytes 0..0 came, 0 of 40 are here",
    "a block too long": "block 0: bytes 0..1000 came, 0 of 40 are here",
    "another weight within a block": "shard 2: its blocks differ in weight",
    "a contribution twice": "block 1 of shard 2 has already arrived",
    "a result too early": "unexpected result of shard 2",
    "a report ahead": "a report on the weights after step 1001, which was not requested",
    "a command": "STEP_COMMIT is not for the coordinator",
    "a state": "STATE is not a control message",
    "a replay": "STATE_LOADED: received frame 1, expected 2",
    "garbage": "the peer does not use Motley's protocol (bad magic)",
    "a broken checksum": "HEARTBEAT: checksum does not match",
}


@pytest.mark.parametrize("kind", sorted(MISBEHAVIOUR))
def test_it_ends_the_membership_and_the_run_goes_on(problem: ExactProblem, kind: str):
    cluster = SimulatedCluster(problem, workers=3)
    for worker in cluster.workers:
        cluster.connect(worker)
        cluster.deliver_up(worker)
        cluster.deliver_down(worker)
        cluster.deliver_up(worker)
    bad = cluster.workers[2]
    cluster.deliver_down(bad)
    MISBEHAVIOUR[kind](cluster, bad)
    cluster.deliver_up(bad)
    assert [(event["rank"], event["reason"]) for event in cluster.named("lost")] == [
        (2, REASONS[kind])
    ]
    assert cluster.named("reassigned")[0]["ranks"] == [0, 1]
    cluster.deliver_down(bad)
    assert bad.wire is None
    cluster.run_to_end()
    assert len(cluster.named("lost")) == 1
