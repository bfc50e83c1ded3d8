"""A worker's side: what a coordinator must not send, and what must not leave a membership."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from trainer.exchange.coordinator.membership import RESUME_PATIENCE
from trainer.exchange.protocol.blocks import make_block_frames
from trainer.exchange.protocol.codecs import make_codec
from trainer.exchange.protocol.messages import (
    Heartbeat,
    JoinAccepted,
    Message,
    ShardAssignment,
    StepCommit,
)
from trainer.exchange.protocol.state_transfer import StateDelivery, make_state_frames
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Admitted, Committed, Session
from trainer.optimizer.adamw import TrainState
from trainer.system.errors import ProtocolError

pytestmark = pytest.mark.usefixtures("small_frames")

PROBLEM = ExactProblem()
GENERATION = 4
COMMIT = StepCommit(
    step=3,
    loss=1,
    grad_norm=1,
    clip_scale=1,
    learning_rate=0.1,
    report_weights=False,
    next_assignment=None,
)
SHARD = ShardAssignment(kind="train", shard=1, step=3, epoch=0, start=4, stop=6)


def state_at(step: int) -> TrainState:
    state = PROBLEM.fresh_state()
    state.first_moment += 0.5
    state.second_moment += 0.25
    state.step = step
    return state


def accepted(state: TrainState, moments: bool) -> Frame:
    message = JoinAccepted(
        rank=1,
        generation=GENERATION,
        step=state.step,
        has_moments=moments,
        heartbeat=0.5,
        lost_after=3.0,
    )
    return message.to_frame(GENERATION)


def joined(step: int = 3) -> Session:
    """Return a session that has its state."""
    session = Session(join_request(1), PROBLEM.layout, "fp32")
    state = state_at(step)
    session.receive_frame(accepted(state, moments=True))
    for frame in make_state_frames(state.take_snapshot(), GENERATION, moments=True):
        session.receive_frame(frame)
    return session


def averages(blocks: Iterable[int], value: float | None = None) -> list[Frame]:
    """Return averages that are all `value`, or else the number of their block."""
    codec = make_codec("fp32")
    frames: list[Frame] = []
    for index in blocks:
        block = PROBLEM.layout.blocks[index]
        kind = MessageType.AVERAGED_GRADIENT
        values = np.full(block.size, index if value is None else value, np.float32)
        encoded = codec.encode(values)
        frames += make_block_frames(kind, encoded, GENERATION, 3, index, codec, weight=7)
    return frames


def refused(session: Session, frame: Frame) -> str:
    with pytest.raises(ProtocolError) as caught:
        session.receive_frame(frame)
    return str(caught.value)


# Joining


@pytest.mark.parametrize("moments", [False, True])
def test_a_state_arrives_whole_and_is_proved(moments: bool):
    session = Session(join_request(1), PROBLEM.layout, "fp32")
    state = state_at(5) if moments else PROBLEM.fresh_state()
    delivery = StateDelivery()
    assert session.receive_frame(accepted(state, moments)) == ([], [])
    *some, last = delivery.make_state_frames(state.take_snapshot(), GENERATION, moments)
    assert len(some) == (3 if moments else 1) * 8 - 1
    for frame in some:
        assert session.receive_frame(frame) == ([], [])
    (restored,), (proof,) = session.receive_frame(last)
    assert isinstance(restored, Admitted)
    assert restored.rank == 1
    assert restored.state.compute_digest() == state.compute_digest()
    assert proof.type is MessageType.STATE_LOADED
    assert delivery.digest.encode() in bytes(proof.payload)
    assert not moments or delivery.digest == state.compute_digest()


def test_a_state_in_another_order_or_too_much_of_it():
    state = state_at(5)
    frames = list(make_state_frames(state.take_snapshot(), GENERATION, moments=True))
    for wrong in ([frames[1]], [frames[0], frames[0]], [frames[0], frames[8]], [frames[8]]):
        session = Session(join_request(1), PROBLEM.layout, "fp32")
        session.receive_frame(accepted(state, moments=True))
        *right, bad = wrong
        for frame in right:
            session.receive_frame(frame)
        assert "out of order" in refused(session, bad)
    session = joined()
    assert refused(session, frames[0]) == "unexpected state"


def test_a_state_of_another_step():
    session = Session(join_request(1), PROBLEM.layout, "fp32")
    session.receive_frame(accepted(state_at(5), moments=False))
    frame = next(make_state_frames(state_at(6).take_snapshot(), GENERATION, moments=False))
    assert "out of order" in refused(session, frame)


def test_the_digest_is_there_before_the_last_frame_leaves():
    """The proof can be back before the link asks for more."""
    delivery = StateDelivery()
    frames = delivery.count_stream(
        delivery.make_state_frames(state_at(5).take_snapshot(), GENERATION, moments=True)
    )
    digests = [delivery.digest for _ in frames]
    assert digests[-1]
    assert not any(digests[:-1])
    assert delivery.waiting == 0


@pytest.mark.parametrize("message", [Heartbeat(), COMMIT, SHARD])
def test_nothing_before_the_answer(message: Message):
    session = Session(join_request(1), PROBLEM.layout, "fp32")
    assert "before JoinAccepted" in refused(session, message.to_frame(GENERATION))


# A step


def test_a_commit_needs_every_average_once():
    session = joined()
    assert "before all averages" in refused(session, COMMIT.to_frame(GENERATION))
    session = joined()
    for frame in averages(range(3)):
        assert session.receive_frame(frame) == ([], [])
    assert "before all averages" in refused(session, COMMIT.to_frame(GENERATION))
    for frame in averages([3]):
        session.receive_frame(frame)
    (committed,), answers = session.receive_frame(COMMIT.to_frame(GENERATION))
    assert answers == []
    assert isinstance(committed, Committed)
    for block in PROBLEM.layout.blocks:
        assert (committed.gradient[block.start : block.stop] == block.index).all()
    before = committed.gradient.copy()
    for frame in averages([3], value=9):
        session.receive_frame(frame)
    assert committed.gradient.tobytes() == before.tobytes(), "the next step has its own array"


def test_an_average_twice_or_of_no_block():
    session = joined()
    for frame in averages([2]):
        session.receive_frame(frame)
    assert "unexpected average of block 2" in refused(session, averages([2])[0])
    wide = Frame(MessageType.AVERAGED_GRADIENT, bytes(16), GENERATION, 3, block=4)
    assert "unexpected average of block 4" in refused(session, wide)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codec": 1}, "received codec 1, expected fp32"),
        ({"offset": 4}, "bytes 4..20 came, 0 of 40 are here"),
        ({"payload": b""}, "bytes 0..0 came"),
        ({"payload": bytes(44)}, "bytes 0..44 came"),
        ({"generation": GENERATION - 1}, "AVERAGED_GRADIENT of another generation"),
    ],
)
def test_a_damaged_average(changes: dict, said: str):
    frame = averages([0])[0]
    fields = {name: getattr(frame, name) for name in Frame.__slots__}
    assert said in refused(joined(), Frame(**{**fields, **changes}))


def test_a_weight_that_changes_within_an_average():
    session = joined()
    first, second, _ = averages([0])
    session.receive_frame(first)
    fields = {name: getattr(second, name) for name in Frame.__slots__}
    assert "weight changed" in refused(session, Frame(**{**fields, "weight": 8}))


def test_messages_that_are_not_for_a_worker():
    assert "is not for a worker" in refused(joined(), join_request(1).to_frame(GENERATION))


# Memberships do not mix


def test_a_block_leaves_only_for_a_shard_of_this_membership():
    session = joined()
    gradient = np.ones(PROBLEM.layout.blocks[0].size, np.float32)
    assert list(session.make_block_frames(SHARD, 0, gradient, 3)) == []
    session.receive_frame(SHARD.to_frame(GENERATION))
    frames = list(session.make_block_frames(SHARD, 0, gradient, 3))
    assert [(f.shard, f.step, f.rank, f.weight) for f in frames] == [(1, 3, 1, 3)] * 3
    other = SHARD.model_copy(update={"stop": 9})
    assert list(session.make_block_frames(other, 0, gradient, 3)) == []
    for frame in averages(range(4)):
        session.receive_frame(frame)
    session.receive_frame(COMMIT.to_frame(GENERATION))
    assert list(session.make_block_frames(SHARD, 0, gradient, 3)) == [], "the step is over"


def test_a_shard_number_means_other_samples_after_a_restart():
    """F-DP-002: a worker that still computes for the old coordinator must not deceive the new."""
    cluster = SimulatedCluster(PROBLEM, workers=3)
    while not cluster.saves:
        cluster.go_on()
    cluster.kill_coordinator()
    for worker in cluster.workers:
        cluster.kill(worker)
        cluster.revive(worker)
    cluster.start_coordinator()  # resumed: shards 0, 1 and 2 of three workers
    slow = cluster.workers[1]
    slow.careless = True
    while not cluster.coordinator or not cluster.machine.training.task:
        for worker in cluster.workers:
            cluster.connect(worker)
            cluster.deliver_up(worker)
            cluster.deliver_down(worker)
    cluster.deliver_down(slow)
    slow.step()  # the state
    slow.step()  # forward begins
    old = cluster.machine.training.task.ledger.initial_shards[1]
    cluster.kill_coordinator()
    cluster.kill(cluster.workers[2])
    cluster.start_coordinator()  # resumed again: shards 0 and 1 of two workers
    cluster.pass_time(RESUME_PATIENCE + 2)
    assert cluster.machine.training.task
    new = cluster.machine.training.task.ledger.initial_shards[1]
    assert (old.id, old.rank) == (new.id, new.rank)
    assert old.size != new.size
    cluster.run_to_end()
