"""A coordinator or worker of a measurement: `python -P -m benchmarks.rig.member SPEC`.

It prints JSON lines on standard output and reads standard input: `go` opens the gate that a gated
worker waits at. When standard input closes it ends at once, so that nothing outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig import synthetic, training
from benchmarks.rig.interface import counted
from trainer.config.run import RunConfig
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import Save, Step
from trainer.exchange.protocol.messages import JoinRequest, ShardAssignment
from trainer.exchange.protocol.schedule import StepPlan, flush_periods
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.transport import tls
from trainer.exchange.transport.client import WorkerClient
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.listener import bind_address
from trainer.exchange.transport.server import GradientServer
from trainer.exchange.worker.session import Committed, Event
from trainer.model.initialization import initial_weights
from trainer.model.layout import GradientLayout, build_layout
from trainer.optimizer.adamw import TrainState
from trainer.optimizer.nesterov import Update
from trainer.run.loop import Worker

PATIENCE = 300.0
"""Seconds of silence after which a measurement has failed."""


@dataclass(frozen=True)
class MemberSpec:
    """The arguments of a member; all members of a cluster share most of them."""

    role: Literal["coordinator", "worker"]
    elements: int
    workers: int
    steps: int
    address: tuple[str, int]
    """Where the coordinator listens (port 0: any) or is found."""
    batch: int = 3
    tls: str | None = None
    """Folder of certificates; None for plaintext, which a benchmark may use anywhere."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """More of the run config: dotted keys."""
    rank: int = 0
    gated: int = 0
    """So many first steps wait for `go` between computing and sending."""
    rest: float = 0.0
    """Seconds that a gated step rests before it waits, so that the others are done applying."""
    model: str | None = None
    """Folder of a model that trains; None for gradients out of thin air, of `elements`."""
    group_tokens: int | None = None
    """The most of micro-batches that run layer by layer together; None: by memory."""

    def as_coordinator(self) -> MemberSpec:
        """Return the spec of the coordinator of the same cluster."""
        return replace(self, role="coordinator")

    def as_worker(self, rank: int, port: int) -> MemberSpec:
        """Return the spec of one worker of the same cluster."""
        address = (self.address[0], port)
        return replace(self, role="worker", rank=rank, address=address)

    def arguments(self) -> list[str]:
        """Return the command line of the member."""
        return [sys.executable, "-P", "-m", "benchmarks.rig.member", json.dumps(asdict(self))]

    def config(self) -> RunConfig:
        """Return the run config that all members share."""
        defaults = {
            "checkpoint.every": 10**6,
            "exchange.hash_every": 10**6,
            # A busy machine must not cost a member.
            "exchange.join_deadline": PATIENCE,
            "exchange.step_deadline": PATIENCE,
            "exchange.lost_after": PATIENCE,
        }
        run = {"training.batch_size": self.batch, "training.max_steps": self.steps}
        settings = defaults | run | self.settings
        if self.model is not None:
            return training.config(Path(self.model), settings)
        return synthetic.config(settings)

    def layout(self) -> GradientLayout:
        """Return the layout of the gradients."""
        if self.model is not None:
            return build_layout(Path(self.model), self.config())
        return synthetic.layout(self.elements)


def main() -> None:
    """Run the member that the command line describes."""
    given = json.loads(sys.argv[1])
    spec = MemberSpec(**{**given, "address": tuple(given["address"])})
    if spec.tls is None:
        # A benchmark also measures plaintext between hosts, which the product refuses.
        tls.is_loopback = lambda _host: True
    run = coordinate if spec.role == "coordinator" else work
    run(spec)


def say(**details: Any) -> None:
    """Print one line for the program that measures."""
    sys.stdout.write(json.dumps({**details, "at": time.monotonic()}) + "\n")
    sys.stdout.flush()


class Commands:
    """Standard input, read in a thread."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                self.gate.release()
        os._exit(1)


class PrintingRecorder:
    """A Recorder that prints events and saves nothing."""

    failure = None
    ending = None

    def emit(self, event: dict[str, Any]) -> None:
        """Print an event."""
        say(**event)

    def log_step(self, event: Step) -> None:
        """Print a step, and with it the processor time so far."""
        say(event="step", **vars(event), cpu=time.process_time())

    def save(self, save: Save) -> None:
        """Save nothing."""

    def close(self, exit_code: int, reason: str) -> int:
        """Print why the run ended."""
        say(event="closed", reason=reason)
        return exit_code


def coordinate(spec: MemberSpec) -> None:
    """Be the coordinator."""
    Commands()
    of = spec.layout()
    coordinator = Coordinator(
        config=spec.config(),
        job=synthetic.job(of),
        layout=of,
        plan=_plan(spec),
        validation_samples=0,
        state=TrainState.create(_weights(spec, of)),
        expect_workers=spec.workers,
        score=lambda _table: {},
        now=time.monotonic(),
    )
    folder = Path(spec.tls) / "coordinator" if spec.tls else None
    address = bind_address(spec.address, folder)
    code = GradientServer(coordinator, PrintingRecorder(), address).run()
    sys.exit(code)


def work(spec: MemberSpec) -> None:
    """Be a worker, and say at the end when its steps began and ended."""
    commands = Commands()
    of, config = spec.layout(), spec.config()
    job = synthetic.job(of)
    replica: Any
    samples: Any
    if spec.model is None:
        replica = synthetic.InstantReplica(of, spec.rank)
        samples = synthetic.EqualSamples(spec.batch * spec.steps)
    else:
        replica = training.open_replica(Path(spec.model), config, of, spec.rank)
        samples = training.RandomSamples(spec.batch * spec.steps)
        if spec.group_tokens is not None:
            replica.split.group_tokens = spec.group_tokens
    gated = iter(range(spec.gated))

    def pass_gate() -> None:
        if next(gated, None) is not None:
            time.sleep(spec.rest)
            say(event="ready", rank=spec.rank)
            commands.gate.acquire()

    if spec.gated:
        replica.before_blocks = pass_gate
    client = StampingClient(
        spec.address,
        JoinRequest(
            run_id=job.run_id,
            rank=spec.rank,
            motley_version=job.motley_version,
            config_digest=job.config_digest,
            layout_digest=job.layout_digest,
            model_digest=job.model_digest,
            data_digest=job.data_digest,
            host="benchmark",
            backend="cpu",
            device="cpu",
        ),
        of,
        codec=config.exchange.codec,
        folder=Path(spec.tls) / f"rank-{spec.rank}" if spec.tls else None,
        patience=30.0,
    )
    worker = Worker(replica, client, Update(config, of), _plan(spec), samples, None, seed=0)
    end = worker.run()
    say(event="stamps", rank=spec.rank, stamps=client.stamps)
    sys.exit(end.exit_code)


def _plan(spec: MemberSpec) -> StepPlan:
    periods = flush_periods(spec.config())
    return StepPlan(spec.batch * spec.steps, spec.batch, 1, spec.steps, flush_every=periods)


def _weights(spec: MemberSpec, of: GradientLayout) -> NDArray[np.float32]:
    """Return the weights to start from."""
    if spec.model is None:
        return np.ones(of.size, np.float32)
    return initial_weights(of, Path(spec.model), spec.config())


class StampingClient(WorkerClient):
    """A WorkerClient that notes when things happen, in monotonic seconds."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.stamps: list[dict[str, float]] = []
        """A dict a step: `first_send`, `last_average`, `committed`; so far `cpu` seconds, and bytes
        `sent` and `received` by the host's interface, if it has one of its own."""
        self._first_send: dict[int, float] = {}
        self._last_average = 0.0
        super().__init__(*arguments, **named)

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: NDArray[np.float32], weight: int
    ) -> None:
        """Note when a step's first block is handed over."""
        self._first_send.setdefault(shard.step, time.monotonic())
        super().send_block(shard, index, gradient, weight)

    def next_event(self) -> Event | None:
        """Note when a commit reaches the loop."""
        event = super().next_event()
        if isinstance(event, Committed):
            step = event.commit.step
            now = time.monotonic()
            first = self._first_send.pop(step, now)
            self.stamps.append(
                {
                    "first_send": first,
                    "last_average": self._last_average,
                    "committed": now,
                    "cpu": time.process_time(),
                    **counted(),
                }
            )
        return event

    def _on_frame(self, link: Link, frame: Frame) -> None:
        super()._on_frame(link, frame)
        if frame.type is MessageType.AVERAGED_GRADIENT:
            self._last_average = time.monotonic()


if __name__ == "__main__":
    main()
