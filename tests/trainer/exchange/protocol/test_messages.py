"""Control messages: exactly the fields they name, or a ProtocolError of one line."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.exchange.exact_problem import join_request
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.messages import (
    Heartbeat,
    JoinAccepted,
    JoinRefused,
    Leave,
    Message,
    PartialShard,
    ShardAssignment,
    ShardResult,
    Shutdown,
    StateLoaded,
    StepCommit,
    WeightsReport,
    parse_message,
)
from trainer.exchange.protocol.wire import MAX_CONTROL, TENSOR_TYPES, Frame, MessageType
from trainer.exchange.worker.session import make_result_message
from trainer.system.errors import ProtocolError

ASSIGNMENT = ShardAssignment(
    kind="train", shard=4, step=2, epoch=0, start=3, stop=9, missing_blocks=(1, 0)
)
ALL: list[Message] = [
    join_request(3),
    join_request(None),
    JoinAccepted(rank=2, generation=9, step=7, has_moments=True, heartbeat=0.5, lost_after=3),
    JoinRefused(reason="another model", retry=False),
    StateLoaded(step=7, digest="ab"),
    ASSIGNMENT,
    ShardResult(
        shard=4,
        loss_sum=-1.5,
        weight=6,
        tokens=60,
        compute_seconds=0.1,
        overlap_seconds=0.05,
        residual_norm=0.25,
        confusion=((1, 0), (2, 3)),
        figures={"reward_chosen": 1.5, "reward_rejected": -0.5, "reward_accuracy": 3},
    ),
    StepCommit(
        step=2,
        loss=-0.1,
        grad_norm=1,
        clip_scale=1,
        learning_rate=0.1,
        report_weights=True,
        next_assignment=ASSIGNMENT,
    ),
    WeightsReport(step=2, digest="ab"),
    PartialShard(shard=5, samples=12),
    Heartbeat(),
    Leave(reason="SIGTERM"),
    Shutdown(reason="done", exit_code=0),
]


def refused(kind: MessageType, payload: bytes | str) -> str:
    """Return why a payload is refused, having checked that it is said in one short line."""
    data = payload.encode() if isinstance(payload, str) else payload
    with pytest.raises(ProtocolError) as caught:
        parse_message(Frame(kind, data))
    reason = str(caught.value)
    assert "\n" not in reason
    assert reason.isprintable()
    assert len(reason) < 300
    assert reason.startswith(kind.name)
    return reason


def fields(message: Message) -> dict[str, Any]:
    return json.loads(message.model_dump_json())


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message):
    frame = message.to_frame(generation=5, step=2, rank=1)
    assert (frame.generation, frame.step, frame.rank) == (5, 2, 1)
    assert len(frame.payload) <= MAX_CONTROL
    assert parse_message(frame) == message
    assert parse_message(Frame(frame.type, memoryview(bytearray(frame.payload)))) == message


def test_every_control_type_has_a_message():
    assert {message.type for message in ALL} | TENSOR_TYPES == set(MessageType)
    for kind in TENSOR_TYPES:
        assert "not a control message" in refused(kind, b"{}")


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_unknown_and_missing_fields(message: Message):
    tree = fields(message)
    assert "surprise" in refused(message.type, json.dumps({**tree, "surprise": 1}))
    for name, info in type(message).model_fields.items():
        if info.is_required():
            rest = {key: value for key, value in tree.items() if key != name}
            assert name in refused(message.type, json.dumps(rest))


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_wrong_types_are_never_converted(message: Message):
    tree = fields(message)
    for name, value in tree.items():
        wrong: list[Any] = [{"a": "1"}, [[["x"]]]]
        if not isinstance(value, str):
            wrong += ["1", "true"]
        if not isinstance(value, bool):
            wrong += [True]
        if isinstance(value, int) and not isinstance(value, bool):
            wrong += [-1]
        if isinstance(value, str) and name != "kind":
            wrong += [1, None, "x" * 1001]
        for bad in wrong:
            assert name in refused(message.type, json.dumps({**tree, name: bad}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "clip_scale", "learning_rate"])
def test_numbers_that_are_none(name: str, number: str):
    commit = fields(ALL[7])
    text = json.dumps({**commit, name: "HERE"}).replace('"HERE"', number)
    assert name in refused(MessageType.STEP_COMMIT, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shard", 2**63),
        ("weight", -1),
        ("compute_seconds", -0.001),
        ("tokens", 1.5),
        ("confusion", [[-1]]),
    ],
)
def test_out_of_range(name: str, value: Any):
    assert name in refused(MessageType.SHARD_RESULT, json.dumps({**fields(ALL[6]), name: value}))


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("number", ["1.7e308", "-1.7e308", "1" + "0" * 400])
def test_no_number_is_too_large_to_compute_with(message: Message, number: str):
    """A worker's 1.7e308 seconds or watts made an infinite sum of the coordinator's."""
    tree = fields(message)
    for name, value in tree.items():
        if name in ("loss", "loss_sum"):
            continue  # F-DP-003: a run whose loss is no number halts
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = json.dumps({**tree, name: "HERE"}).replace('"HERE"', number)
            assert name in refused(message.type, text)


@pytest.mark.parametrize("text", ["a\nINFO: rank 0 lost", "\x1b[2J", "a\rb", "a\u2028b", "\x9b2J"])
def test_what_is_logged_of_a_request_is_one_plain_line(text: str):
    tree = fields(ALL[0])
    for name, value in tree.items():
        if isinstance(value, str):
            assert name in refused(MessageType.JOIN_REQUEST, json.dumps({**tree, name: text}))


def test_ranks_and_exit_codes_have_their_range():
    assert "rank" in refused(
        MessageType.JOIN_REQUEST, json.dumps({**fields(ALL[0]), "rank": 2**16})
    )
    shutdown = {"reason": "", "exit_code": 256}
    assert "exit_code" in refused(MessageType.SHUTDOWN, json.dumps(shutdown))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"\xff\xfe",
        b'{"reason": "\xff"}',
        b'{"reason": "\\ud800"}',
        b"{} trailing",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"reason": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"reason": "x", "exit_code": ' + b"9" * 60_000 + b"}",
        b"\x00" * MAX_CONTROL,
    ],
    ids=range(15),
)
def test_not_json(payload: bytes):
    refused(MessageType.SHUTDOWN, payload)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(payload: bytes):
    for kind in set(MessageType) - TENSOR_TYPES:
        with contextlib.suppress(ProtocolError):
            parse_message(Frame(kind, payload))


def test_what_a_peer_wrote_is_not_echoed_at_length():
    secret = "x" * 50_000
    assert secret[:400] not in refused(MessageType.LEAVE, json.dumps({"reason": secret}))
    assert secret[:400] not in refused(MessageType.LEAVE, json.dumps({"reason": "", secret: 1}))
    refused(MessageType.LEAVE, json.dumps({"reason": "", "\x1b[31m\nforged log line": 1}))


def test_a_loss_that_is_not_finite_travels_as_null():
    for loss in (float("nan"), float("inf"), float("-inf")):
        result = make_result_message(ASSIGNMENT, loss, 6, 60, 0.1)
        assert result.loss_sum is None
        assert parse_message(result.to_frame(1)) == result


def test_a_reason_fits_its_message():
    """What others wrote goes into our messages; it must not break them."""
    with pytest.raises(ValueError):
        messages.JoinRefused(reason="x" * 1001, retry=True)
