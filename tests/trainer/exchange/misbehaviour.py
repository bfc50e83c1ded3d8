"""What a correct worker never sends, each as a function of the cluster and the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker, Wire
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.protocol.messages import (
    BlockParts,
    CarryRequest,
    Heartbeat,
    JoinRefused,
    StepCommit,
    WeightsReport,
)
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Session, result_message

Misbehaviour = Callable[[SimulatedCluster, SimulatedWorker], None]


def _connection(worker: SimulatedWorker) -> tuple[Session, Wire]:
    assert worker.session
    assert worker.wire
    return worker.session, worker.wire


def _shard(cluster: SimulatedCluster, rank: int, own: bool) -> Shard | None:
    """Return a shard of the round under way that is, or is not, the rank's."""
    assert cluster.coordinator
    round_ = cluster.coordinator.training.round
    shards = round_.ledger.dealt if round_ else []
    return next((shard for shard in shards if (shard.rank == rank) == own), None)


def _gradient(own: bool = True, **changes: Any) -> Misbehaviour:
    """Return who sends the first 16 bytes of block 0, with something wrong in the header."""

    def send(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
        session, wire = _connection(worker)
        assert cluster.coordinator
        round_ = cluster.coordinator.training.round
        shard = _shard(cluster, session.rank, own)
        fields: dict[str, Any] = {
            "type": MessageType.BLOCK_GRADIENT,
            "payload": bytes(16),
            "generation": session.generation,
            "step": round_.step if round_ else 0,
            "rank": session.rank,
            "block": 0,
            "shard": shard.id if shard else 2**30,
            "weight": 1,
            "codec": 0 if cluster.problem.config.exchange.codec == "fp32" else 1,
        }
        changed = {
            name: value(fields[name]) if callable(value) else value
            for name, value in changes.items()
        }
        wire.up.send([Frame(**{**fields, **changed})])

    return send


def _twice(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Send a right contribution two times."""
    session, wire = _connection(worker)
    problem = cluster.problem
    assert cluster.coordinator
    round_ = cluster.coordinator.training.round
    shard = _shard(cluster, session.rank, own=True)
    if shard is None or round_ is None or round_.sums is None:
        return
    block = problem.layout.send_order[0]
    span = problem.layout.blocks[block]
    total = problem.shard_gradient(round_.epoch, shard.start, shard.stop)
    weight = problem.shard_weight(shard.start, shard.stop)
    assignment = round_.assignment(shard).model_copy(update={"blocks": None})
    for _ in range(2):
        wire.up.send(session.block(assignment, block, total[span.start : span.stop], weight))


def _weight_within_a_block(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    _gradient()(cluster, worker)
    _gradient(offset=16, weight=2)(cluster, worker)


def _early_result(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Send the result of a shard whose gradients are not here."""
    session, wire = _connection(worker)
    assert cluster.coordinator
    round_ = cluster.coordinator.training.round
    shard = _shard(cluster, session.rank, own=True)
    if shard and round_ and shard.id in round_.groups:
        return  # there it may come first
    if round_ and round_.sums and shard and len(round_.ledger.missing(shard.id)) > 1:
        wire.up.send([session.message(result_message(round_.assignment(shard), 1.0, 1, 1, 0.1))])


def _old_generation(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    wire.up.send([Heartbeat().frame(session.generation - 1, 0, session.rank)])


def _parts_of_nothing(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Say what is in a sum that nobody asked for, or something else than is in it."""
    session, wire = _connection(worker)
    shard = _shard(cluster, session.rank, own=True)
    if shard:
        parts = BlockParts(shard=shard.id, block=0, parts=())
        wire.up.send([session.message(parts)])


def _carry_request(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    wire.up.send([session.message(CarryRequest(rank=0, generation=1))])


def _report_ahead(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    wire.up.send([session.message(WeightsReport(step=1000, digest="x"))])


def _command(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    commit = StepCommit(
        step=0, loss=0, grad_norm=0, clip_scale=1, learning_rate=1, report=False, next=None
    )
    wire.up.send([session.message(commit)])
    wire.up.send([session.message(JoinRefused(reason="", retry=True))])


def _state(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    wire.up.send([Frame(MessageType.STATE, bytes(16), session.generation)])


def _replay(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    wire = _connection(worker)[1]
    wire.up.send_raw(wire.up.last_frame)


def _garbage(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    _connection(worker)[1].up.send_raw(bytes(range(256)))


def _broken_checksum(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session, wire = _connection(worker)
    frame = bytearray(b"".join(wire.up.encoder.encode(Heartbeat().frame(session.generation))))
    frame[-1] ^= 1
    wire.up.send_raw(bytes(frame))


MISBEHAVIOUR: dict[str, Misbehaviour] = {
    "an old generation": _old_generation,
    "another's shard": _gradient(own=False),
    "an unknown shard": _gradient(shard=2**31),
    "another step": _gradient(step=lambda step: step + 1),
    "another rank": _gradient(rank=lambda rank: rank + 1),
    "a block that is not there": _gradient(block=4000),
    "a layer as another block": _gradient(type=MessageType.NON_BLOCK_GRADIENT),
    "another codec": _gradient(codec=9),
    "a gap in a block": _gradient(offset=8),
    "an empty piece": _gradient(payload=b""),
    "a block too long": _gradient(payload=bytes(1000)),
    "another weight within a block": _weight_within_a_block,
    "a contribution twice": _twice,
    "a result too early": _early_result,
    "parts of nothing": _parts_of_nothing,
    "a request to be carried": _carry_request,
    "a report ahead": _report_ahead,
    "a command": _command,
    "a state": _state,
    "a replay": _replay,
    "garbage": _garbage,
    "a broken checksum": _broken_checksum,
}
