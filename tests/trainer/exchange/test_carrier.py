"""What a carrier takes from the workers of its host, and the bits of what it sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from tests.trainer.exchange.exact_problem import join_request, tiny_layout
from trainer.exchange.protocol.messages import (
    BlockParts,
    CarryAccepted,
    CarryRequest,
    JoinAccepted,
    ShardAssignment,
    StepCommit,
    parse,
)
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.carrier import Carrier
from trainer.exchange.worker.session import Committed, Session
from trainer.system.errors import ProtocolError

LAYOUT = tiny_layout()
BLOCK = LAYOUT.blocks[1]
GENERATION, STEP = 7, 3
OWN, OTHER = 2, 5
TASK = ShardAssignment(
    kind="train", shard=11, step=STEP, epoch=0, start=4, stop=8, carries=((OTHER, 10), (OWN, 11))
)
FIRST, SECOND = 1, 2
"""Links of the other worker."""


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(BLOCK.size).astype(np.float32)


def hand_over(values: np.ndarray | None = None, **changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "payload": (draw(1) if values is None else values).tobytes(),
        "generation": GENERATION + 1,
        "step": STEP,
        "rank": OTHER,
        "block": BLOCK.index,
        "shard": 10,
        "weight": 3,
    }
    return Frame(MessageType.BLOCK_GRADIENT, **{**fields, **changes})


def carrier(codec: str = "fp32", task: ShardAssignment = TASK) -> Carrier:
    """Return one that has its assignment, and a link to another worker."""
    session = Session(join_request(OWN), LAYOUT, codec)
    accepted = JoinAccepted(
        rank=OWN, generation=GENERATION, step=STEP, moments=True, heartbeat=1, lost_after=3
    )
    session.receive(accepted.frame(0))
    session.receive(task.frame(GENERATION, STEP, OWN))
    made = Carrier(session, LAYOUT)
    introduce(made, FIRST)
    assert not list(made.follow(task))
    return made


def introduce(made: Carrier, link: int) -> None:
    request = CarryRequest(rank=OTHER, generation=GENERATION + 1)
    answers, upwards = made.receive(link, request.frame(GENERATION + 1, rank=OTHER))
    assert not list(upwards)
    assert [parse(answer) for answer in answers] == [CarryAccepted(rank=OWN, generation=GENERATION)]


def own(made: Carrier, values: np.ndarray, weight: int = 4) -> list[Frame]:
    return list(made.add(TASK, BLOCK.index, values, weight))


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_it_adds_in_the_order_of_samples_and_rounds_once(codec: str, own_first: bool):
    made, mine, theirs = carrier(codec), draw(1), draw(2) * 1000
    if own_first:
        assert not own(made, mine)
        said, gradient = made.receive(FIRST, hand_over(theirs))[1]
    else:
        assert not list(made.receive(FIRST, hand_over(theirs))[1])
        said, gradient = own(made, mine)
    total = theirs + mine
    expected = total if codec == "fp32" else total.astype(bfloat16)
    assert bytes(gradient.payload) == expected.tobytes()
    assert (gradient.shard, gradient.weight, gradient.rank) == (TASK.shard, 7, OWN)
    told = parse(said)
    assert isinstance(told, BlockParts)
    assert (told.shard, told.block) == (TASK.shard, BLOCK.index)
    assert [part.weight for part in told.parts] == [3, 4], "as `carries` lists them"
    norms = [float(np.linalg.norm(values)) for values in (theirs, mine)]
    assert [part.norm for part in told.parts] == pytest.approx(norms)


def test_norms_that_overflow_fp32_and_the_tensor_of_the_largest():
    made, large = carrier(), draw(1)
    large[7] = 1e30
    list(made.receive(FIRST, hand_over(large))[1])
    told = parse(own(made, draw(2))[0])
    assert isinstance(told, BlockParts)
    assert (told.parts[0].norm, told.parts[0].tensor) == (pytest.approx(1e30), 1)


def test_what_is_handed_over_early_waits_and_what_is_late_is_dropped():
    made = carrier()
    list(made.receive(FIRST, hand_over(step=STEP + 1, shard=12))[1])
    commit = StepCommit(
        step=STEP, loss=0, grad_norm=0, clip_scale=1, learning_rate=1, report=False, next=None
    )
    list(made.follow(Committed(commit, np.zeros(LAYOUT.size, np.float32))))
    assert not own(made, draw(2)), "its own is late too"
    assert not list(made.receive(FIRST, hand_over())[1])
    following = TASK.model_copy(
        update={"shard": 13, "step": STEP + 1, "carries": ((OTHER, 12), (OWN, 13))}
    )
    assert not list(made.follow(following))
    assert made.add(following, BLOCK.index, draw(2), 4)


def test_what_came_over_an_older_link_is_void():
    made = carrier()
    list(made.receive(FIRST, hand_over())[1])
    introduce(made, SECOND)
    assert not own(made, draw(2)), "the worker is back, and has handed over nothing yet"
    assert len(list(made.receive(SECOND, hand_over())[1])) == 2


def test_a_link_that_closes_takes_what_came_with_it():
    made = carrier()
    list(made.receive(FIRST, hand_over())[1])
    made.gone(FIRST)
    assert not own(made, draw(2))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (replace(hand_over(), type=MessageType.STATE), "not for a carrier"),
        (hand_over(block=4), "BLOCK_GRADIENT of block 4 is not for a carrier"),
        (hand_over(rank=OWN), "another worker than rank 5"),
        (hand_over(generation=GENERATION), "another worker than rank 5"),
        (hand_over(codec=1), "codec 1 came, a carrier takes fp32"),
        (hand_over(offset=4), "bytes 4..44 came, 0 of 40 are here"),
    ],
)
def test_what_makes_no_sense_is_refused(frame: Frame, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        carrier().receive(FIRST, frame)


def test_nothing_is_taken_twice_or_from_strangers():
    made = carrier()
    list(made.receive(FIRST, hand_over())[1])
    with pytest.raises(ProtocolError, match="block 1 of shard 10 is here already"):
        made.receive(FIRST, hand_over())
    with pytest.raises(ProtocolError, match="BLOCK_GRADIENT is not a control message"):
        made.receive(SECOND, hand_over())
