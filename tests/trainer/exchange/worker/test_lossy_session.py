"""A worker's side with error feedback: when a block is encoded, and what is owed after it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import join_request, tiny_layout
from tests.trainer.exchange.lossy_cluster import feedback_of
from trainer.exchange.protocol.blocks import make_block_frames
from trainer.exchange.protocol.codecs import Bf16, make_codec
from trainer.exchange.protocol.messages import (
    JoinAccepted,
    ShardAssignment,
    StepCommit,
    parse_message,
)
from trainer.exchange.protocol.state_transfer import make_state_frames
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Session, make_result_message
from trainer.optimizer.adamw import TrainState
from trainer.system.errors import ProtocolError

LAYOUT = tiny_layout()
CODEC = "int4"
GENERATION = 4
SHARD = ShardAssignment(
    kind="train", shard=1, step=0, epoch=0, start=4, stop=6, global_batch_size=8
)
COMMIT = StepCommit(
    step=0,
    loss=1,
    grad_norm=1,
    clip_scale=1,
    learning_rate=0.1,
    report_weights=False,
    next_assignment=None,
)
VALUES = np.arange(1, 11, dtype=np.float32)
OWED = 5**0.5
"""The norm of what is dropped: the unit is 2, and the odd ones are off by 1."""


@pytest.fixture
def session() -> Session:
    """Return a session that has its state and a shard."""
    made = Session(join_request(1), LAYOUT, CODEC, rounds=True)
    state = TrainState.create(np.zeros(LAYOUT.size, np.float32))
    accepted = JoinAccepted(
        rank=1, generation=GENERATION, step=0, has_moments=False, heartbeat=0.5, lost_after=3.0
    )
    made.receive_frame(accepted.to_frame(GENERATION))
    for frame in make_state_frames(state.take_snapshot(), GENERATION, moments=False):
        made.receive_frame(frame)
    made.receive_frame(SHARD.to_frame(GENERATION))
    return made


def owed(session: Session) -> float:
    return feedback_of(session).norm


def average(codec_name: str) -> list[Frame]:
    """Return the averages of one step, in the lossy codec or in bf16."""
    frames: list[Frame] = []
    for block in LAYOUT.blocks:
        agreed = make_codec(CODEC)
        codec = Bf16() if codec_name == "bf16" else agreed
        kind = MessageType.AVERAGED_GRADIENT
        encoded = codec.encode(np.full(block.size, 2, np.float32))
        frames += make_block_frames(kind, encoded, GENERATION, 0, block.index, codec, weight=8)
    return frames


def test_a_block_is_encoded_when_it_is_drawn_and_not_by_who_computes(session: Session) -> None:
    gradient = VALUES.copy()
    frames = session.make_block_frames(SHARD, 0, gradient, 3)
    gradient[:] = 777
    assert owed(session) == 0
    assert [frame.codec for frame in frames] == [3]
    assert owed(session) == pytest.approx(OWED)
    result = make_result_message(SHARD, 1.0, 3, 3, 0.1)
    (answer,) = session.make_answer_frames(result, 0)
    assert parse_message(answer) == result.model_copy(update={"residual_norm": owed(session)})


def test_a_further_shard_of_the_step_sends_what_the_first_one_dropped_once(
    session: Session,
) -> None:
    further = SHARD.model_copy(update={"shard": 2, "missing_blocks": (0,)})
    session.receive_frame(further.to_frame(GENERATION))
    codec = make_codec(CODEC)
    total, out = np.zeros(10, np.float32), np.empty(10, np.float32)
    for shard in (SHARD, further):
        (frame,) = session.make_block_frames(shard, 0, VALUES, 3)
        codec.decode(np.frombuffer(frame.payload, np.uint8), out)
        total += out
    residual = feedback_of(session).residuals[0]
    np.testing.assert_allclose(total + residual, 2 * VALUES, rtol=0.01)


def test_a_block_that_counts_no_more_is_never_encoded(session: Session) -> None:
    list(session.make_block_frames(SHARD, 1, VALUES, 3))
    before = owed(session)
    waiting = session.make_block_frames(SHARD, 0, VALUES, 3)
    for frame in average(CODEC):
        session.receive_frame(frame)
    session.receive_frame(
        COMMIT.model_copy(update={"residuals_flushed": False}).to_frame(GENERATION)
    )
    assert list(waiting) == []
    assert owed(session) == before, "block 1 was drawn in time"


@pytest.mark.parametrize("flushed", [False, True])
def test_what_is_owed_at_a_flush_commit_is_dropped(session: Session, flushed: bool) -> None:
    list(session.make_block_frames(SHARD, 0, VALUES, 3))
    for frame in average("bf16" if flushed else CODEC):
        session.receive_frame(frame)
    session.receive_frame(
        COMMIT.model_copy(update={"residuals_flushed": flushed}).to_frame(GENERATION)
    )
    assert (owed(session) == 0) == flushed


def test_a_shard_that_flushes_reports_only_what_it_cannot_send(session: Session) -> None:
    list(session.make_block_frames(SHARD, 0, VALUES, 3))
    before = owed(session)
    for blocks, rest in ((None, 0.0), ((1, 2), before), ((0,), 0.0)):
        number = 10 if blocks is None else 10 + len(blocks)
        flushing = SHARD.model_copy(
            update={"shard": number, "missing_blocks": blocks, "in_bf16": True}
        )
        session.receive_frame(flushing.to_frame(GENERATION))
        result = make_result_message(flushing, 1.0, 3, 3, 0.1)
        (answer,) = session.make_answer_frames(result, 0)
        assert parse_message(answer) == result.model_copy(update={"residual_norm": rest})


def test_an_average_that_lies_ends_the_membership(session: Session) -> None:
    frame = average(CODEC)[0]
    damaged = bytearray(frame.payload)
    damaged[0] = 0xFF
    fields = {name: getattr(frame, name) for name in Frame.__slots__}
    with pytest.raises(ProtocolError, match="int4: exponent 255, at most 253"):
        session.receive_frame(Frame(**{**fields, "payload": bytes(damaged)}))
    with pytest.raises(ProtocolError, match="received codec 2, expected int4"):
        session.receive_frame(Frame(**{**fields, "codec": 2, "block": 1}))
