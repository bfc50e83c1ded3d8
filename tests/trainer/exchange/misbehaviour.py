"""What a correct worker never sends, each as a function of the cluster and the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.simulated_worker import Pipe, SimulatedWorker
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.protocol.messages import Heartbeat, JoinRefused, StepCommit, WeightsReport
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Session, make_result_message

Misbehaviour = Callable[[SimulatedCluster, SimulatedWorker], None]


def _session(worker: SimulatedWorker) -> Session:
    assert worker.session
    return worker.session


def _shard(cluster: SimulatedCluster, rank: int, own: bool) -> Shard | None:
    """Return a shard of the round under way that is, or is not, the rank's."""
    task = cluster.machine.training.task
    shards = task.ledger.initial_shards if task else []
    return next((shard for shard in shards if (shard.rank == rank) == own), None)


def _gradient(own: bool = True, **changes: Any) -> Misbehaviour:
    """Return who sends the first 16 bytes of block 0, with something wrong in the header."""

    def send(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
        session = _session(worker)
        task = cluster.machine.training.task
        shard = _shard(cluster, session.rank, own)
        fields: dict[str, Any] = {
            "type": MessageType.GRADIENT,
            "payload": bytes(16),
            "generation": session.generation,
            "step": task.step if task else 0,
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
        worker.post(Frame(**{**fields, **changed}))

    return send


def _twice(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Send a right contribution two times."""
    session = _session(worker)
    problem = cluster.problem
    task = cluster.machine.training.task
    shard = _shard(cluster, session.rank, own=True)
    if shard is None or task is None or task.sums is None:
        return
    block = problem.layout.send_order[0]
    span = problem.layout.blocks[block]
    total = problem.shard_gradient(task.epoch, shard.start, shard.stop)
    weight = problem.shard_weight(shard.start, shard.stop)
    assignment = task.make_assignment(shard).model_copy(update={"missing_blocks": None})
    for _ in range(2):
        worker.post(
            *session.make_block_frames(assignment, block, total[span.start : span.stop], weight)
        )


def _weight_within_a_block(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    _gradient()(cluster, worker)
    _gradient(offset=16, weight=2)(cluster, worker)


def _early_result(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Send the result of a shard whose gradients are not here."""
    task = cluster.machine.training.task
    shard = _shard(cluster, _session(worker).rank, own=True)
    if task and task.sums and shard and len(task.ledger.find_missing(shard.id)) > 1:
        worker.send(make_result_message(task.make_assignment(shard), 1.0, 1, 1, 0.1))


def _old_generation(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    session = _session(worker)
    worker.post(Heartbeat().to_frame(session.generation - 1, 0, session.rank))


def _command(_: SimulatedCluster, worker: SimulatedWorker) -> None:
    commit = StepCommit(
        step=0,
        loss=0,
        grad_norm=0,
        clip_scale=1,
        learning_rate=1,
        report_weights=False,
        next_assignment=None,
    )
    worker.send(commit)
    worker.send(JoinRefused(reason="", retry=True))


def _raw(make: Callable[[Pipe, int], bytes]) -> Misbehaviour:
    """Return who sends bytes, made from its connection and its generation."""

    def send(_: SimulatedCluster, worker: SimulatedWorker) -> None:
        assert worker.wire
        worker.wire.up.send_raw(make(worker.wire.up, _session(worker).generation))

    return send


def _broken_checksum(pipe: Pipe, generation: int) -> bytes:
    frame = bytearray(b"".join(pipe.encoder.encode(Heartbeat().to_frame(generation))))
    frame[-1] ^= 1
    return bytes(frame)


MISBEHAVIOUR: dict[str, Misbehaviour] = {
    "an old generation": _old_generation,
    "another's shard": _gradient(own=False),
    "an unknown shard": _gradient(shard=2**31),
    "another step": _gradient(step=lambda step: step + 1),
    "another rank": _gradient(rank=lambda rank: rank + 1),
    "a block that is not there": _gradient(block=4000),
    "another codec": _gradient(codec=9),
    "a gap in a block": _gradient(offset=8),
    "an empty piece": _gradient(payload=b""),
    "a block too long": _gradient(payload=bytes(1000)),
    "another weight within a block": _weight_within_a_block,
    "a contribution twice": _twice,
    "a result too early": _early_result,
    "a report ahead": lambda _, it: it.send(WeightsReport(step=1000, digest="x")),
    "a command": _command,
    "a state": lambda _, it: it.post(Frame(MessageType.STATE, bytes(16), _session(it).generation)),
    "a replay": _raw(lambda pipe, _: pipe.last_frame),
    "garbage": _raw(lambda *_: bytes(range(256))),
    "a broken checksum": _raw(_broken_checksum),
}
