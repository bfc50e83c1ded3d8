"""Lossy codecs through the real machine; every commit of these clusters is accounted for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.trainer.exchange.lossy_cluster import LossyCluster, LossyProblem, feedback_of
from tests.trainer.exchange.staging import (
    assign,
    begun,
    compute,
    open_round,
    redealt,
    saved,
    until_step,
)
from trainer.config.codec import FREE
from trainer.exchange.protocol.wire import Frame, MessageType

pytestmark = pytest.mark.usefixtures("small_frames")

CODECS = ["int8", "int4"]
SETTLED = {3, 4, 6}
"""Of six steps, with a checkpoint every three and a validation after four."""


def problem(codec: str = "int8", **settings: object) -> LossyProblem:
    """Return a run of ordinary steps; those of int4 are before rounds, so they have feedback."""
    given = {"checkpoint__every": 3, "exchange__codec": codec, **settings}
    if codec == "int4":
        given = {"exchange__schedule": "rounds", "exchange__rounds_after": 100, **given}
    return LossyProblem(method="full", **given)


# A run


@pytest.mark.parametrize("codec", CODECS)
def test_a_run_ends_and_saves_flushed_states_alone(codec: str) -> None:
    cluster = LossyCluster(problem(codec), 3)
    cluster.run_to_end()
    assert [step for step, _ in saved(cluster)] == sorted(SETTLED)
    assert not cluster.named("residual_lost")
    assert np.abs(cluster.applied).max() > 0.1


@pytest.mark.parametrize("codec", ["auto", "int8", "int4"])
def test_what_is_owed_of_gradients_is_sent_before_the_first_round(codec: str) -> None:
    """And what rounds owe goes on to the next; the account covers both, and second moments."""
    rounds = {"schedule": "rounds", "rounds_after": 3, "inner_steps": 2}
    given = problem(
        codec,
        **{f"exchange__{name}": value for name, value in rounds.items()},
        training__batch_size=4,
        training__evaluate_every=0,
    )
    cluster = LossyCluster(given, 3)
    cluster.run_to_end()
    assert [step for step, _ in saved(cluster)] == [3, 6, 7]
    assert not cluster.named("residual_lost")
    codecs = [event["codec"] for event in cluster.named("step")]
    assert codecs[3:] == ["int8" if codec == "auto" else codec] * 4
    assert [event["inner_steps"] for event in cluster.named("step")] == [None] * 3 + [2] * 4


@cache
def undisturbed(codec: str) -> dict[int, bytes]:
    """Return the weights after each step of a run that nothing happens to."""
    cluster = LossyCluster(problem(codec), 3)
    cluster.run_to_end()
    return cluster.problem.trajectory


@pytest.mark.parametrize("step", [1, 2, 4, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_from_a_flush_commit_on_the_bits_are_the_same_again(codec: str, step: int) -> None:
    """A coordinator that dies takes all residuals with it, and the steps that knew of them."""
    cluster = LossyCluster(problem(codec), 3)
    until_step(cluster, step)
    last = saved(cluster)[-1][0] if cluster.saves else 0
    cluster.kill_coordinator()
    cluster.run_to_end()
    assert cluster.problem.trajectory == undisturbed(codec)
    done = [event["step"] for event in cluster.named("step")]
    assert done == [*range(1, step + 1), *range(last + 1, 7)]


def test_what_a_codec_drops_is_sent_by_the_bytes_that_were_agreed() -> None:
    """A step's bytes are the codec's, and a flush step's are bf16's."""
    cluster = LossyCluster(problem("int4"), 3)
    cluster.run_to_end()
    agreed = sum(
        cluster.debtors[0].session.codec.codec.encoded_size(b.size)
        for b in cluster.problem.layout.blocks
    )
    for event in cluster.named("step"):
        one_way = 2 * cluster.problem.layout.size if event["step"] in SETTLED else agreed
        assert event["exchange_bytes"] == (3 + 3) * one_way


def test_a_step_names_the_codec_that_it_was_sent_in() -> None:
    """Not the one that was chosen for the next step before its event was written."""
    cluster = LossyCluster(problem("auto"), 3)
    cluster.run_to_end()
    codecs = [event["codec"] for event in cluster.named("step")]
    assert codecs == [FREE[step // 2 % 2] for step in range(6)]


def test_a_stop_between_flush_commits_saves_and_says_what_is_lost() -> None:
    cluster = LossyCluster(problem("int4"), 3)
    until_step(cluster, 1)
    owed = {worker.request.rank: feedback_of(worker.session).norm for worker in cluster.workers}
    cluster.stop()
    assert [step for step, _ in saved(cluster)] == [1]
    said = {event["rank"]: event["norm"] for event in cluster.named("residual_lost")}
    assert said.keys() == {None, 0, 1, 2}
    assert {rank: said[rank] for rank in owed} == pytest.approx(owed)
    cluster.run_to_end()


# Members that go


def test_a_lost_worker_takes_what_it_owes_and_the_event_says_how_much() -> None:
    cluster = LossyCluster(problem("int4"), 3)
    until_step(cluster, 2)
    bad = cluster.workers[1]
    norm = feedback_of(bad.session).norm
    cluster.kill(bad)
    (event,) = cluster.named("residual_lost")
    assert (event["rank"], event["reason"]) == (1, "its worker was lost")
    assert event["norm"] == pytest.approx(norm)
    assert norm > 1
    cluster.run_to_end()
    assert len(cluster.named("residual_lost")) == 1


@pytest.mark.parametrize("blocks", range(4))
@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_that_is_dealt_again_sends_no_residual_twice(codec: str, blocks: int) -> None:
    """The others send two shards in one step, of the second only what had not come."""
    cluster = LossyCluster(problem(codec), 3)
    until_step(cluster, 1)
    for worker in cluster.workers:
        cluster.deliver_down(worker)
        while worker.state and worker.state.step < 1:
            assert worker.step()
    compute(cluster.workers[1], blocks)
    cluster.kill(cluster.workers[1], delivered=None)
    assert redealt(cluster) == [(1, [0, 2])]
    before = cluster.step
    cluster.settle_down()
    assert cluster.step > before
    cluster.run_to_end()


def test_who_has_no_share_of_a_flush_step_drops_what_it_owes() -> None:
    """The third batch has four samples for five workers."""
    cluster = LossyCluster(problem("int4"), 5)
    until_step(cluster, 3)
    (event,) = cluster.named("residual_lost")
    assert event["reason"] == "it had no assignment in the flush step"
    cluster.run_to_end()
    for debtor in cluster.debtors:
        assert feedback_of(debtor.session).norm == 0


# What makes no sense


def scale(value: float) -> bytes:
    return np.array([value], "<f4").tobytes() + bytes(10)


# fmt: off
LIES = {
    "another codec": ("int8", 4, bytes(14), "received codec 4, expected int8"),
    "fp32": ("int8", 0, bytes(40), "received codec 0, expected int8"),
    "an unknown codec": ("int4", 99, bytes(10), "received codec 99, expected int4"),
    "too long": ("int8", 2, bytes(500), "block 0: bytes 0..500 came, 0 of 14 are here"),
    "a NaN scale": ("int8", 2, scale(np.nan), "int8: a scale is negative, too large or not a"),
    "an infinite scale": ("int8", 2, scale(np.inf), "int8: a scale is negative, too large or"),
    "a negative scale": ("int8", 2, scale(-1), "int8: a scale is negative, too large or not a"),
    "a large exponent": ("int4", 3, b"\xff" + bytes(5), "int4: exponent 255, at most 253"),
}
# fmt: on


def lie(cluster: LossyCluster, codec: int, payload: bytes, pieces: int = 16) -> str:
    """Send a block of shard 2 as one that lies, and return why it was expelled."""
    bad = cluster.workers[2]
    assert bad.session
    step = open_round(cluster)
    shard = next(shard for shard in step.ledger.initial_shards if shard.rank == 2)
    for start in range(0, len(payload), pieces):
        frame = Frame(
            MessageType.GRADIENT,
            payload[start : start + pieces],
            generation=bad.session.generation,
            step=step.step,
            rank=2,
            shard=shard.id,
            weight=shard.size,
            offset=start,
            codec=codec,
        )
        bad.post(frame)
    cluster.deliver_up(bad)
    (event,) = cluster.named("lost")
    assert event["rank"] == 2
    assert redealt(cluster) == [(2, [0, 1])]
    cluster.deliver_down(bad)
    assert bad.wire is None
    cluster.run_to_end()
    assert len(cluster.named("lost")) == 1
    return event["reason"]


@pytest.mark.parametrize("kind", LIES)
def test_a_worker_that_lies_is_expelled_and_what_it_sent_is_nowhere(kind: str) -> None:
    codec, number, payload, said = LIES[kind]
    cluster = begun(LossyCluster(problem(codec), 3))
    cluster.deliver_down(cluster.workers[2])
    assert said in lie(cluster, number, payload, pieces=1000)


def test_a_codec_that_changes_within_a_block() -> None:
    cluster = begun(LossyCluster(problem("int8"), 3))
    bad = cluster.workers[2]
    cluster.deliver_down(bad)
    assert bad.session
    first = Frame(
        MessageType.GRADIENT,
        bytes(8),
        generation=bad.session.generation,
        rank=2,
        shard=open_round(cluster).ledger.initial_shards[2].id,
        weight=2,
        codec=1,
    )
    bad.post(first, replace(first, offset=8, codec=2))
    cluster.deliver_up(bad)
    assert cluster.named("lost")[0]["reason"] == "block 0: codec changed within the block"


@pytest.mark.parametrize(
    ("codec", "number", "payload"), [("int4", 3, b"\x80" + bytes(5)), ("auto", 2, scale(1))]
)
def test_a_quantised_block_in_a_step_of_bf16(codec: str, number: int, payload: bytes) -> None:
    """A flush step, and one for which `auto` chose it."""
    cluster = begun(LossyCluster(problem(codec, checkpoint__every=1), 3))
    cluster.deliver_down(cluster.workers[2])
    name = "int4" if codec == "int4" else "int8"
    assert lie(cluster, number, payload) == f"{name} received in a step of bf16"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", CODECS)
def test_a_value_that_is_not_finite_is_named_whatever_the_codec(
    codec: str, value: float, every: int
) -> None:
    cluster = begun(LossyCluster(problem(codec, checkpoint__every=every), 3))
    assign(cluster)
    cluster.workers[1].poison = (1, 7, value)
    cluster.settle_down()
    assert cluster.end.exit_code == 5
    assert "rank 1 sent" in cluster.end.reason
    assert "block layers.1, tensor layers.1.v" in cluster.end.reason
    assert cluster.step == 0
