"""A worker without torch: the real client and loop around a replica of a linear loss in NumPy.

It starts in a fraction of a second, and dies, stalls or lies on request at an exact point:

    python -m tests.cluster.numpy_replica RUN.yaml RUN_ID RANK HOST:PORT
        [--die STEP:block|uploaded] [--half STEP:kill|stall|cut] ...
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.half_blocks import fail, halves
from tests.trainer.data.datasets import load_dataset
from trainer.config import run
from trainer.data.order import permute_epoch
from trainer.data.tokens import Dataset, Encoded
from trainer.exchange.protocol import wire
from trainer.exchange.protocol.messages import Message, ShardAssignment, ShardResult
from trainer.exchange.protocol.wire import TENSOR_TYPES, Frame
from trainer.exchange.transport import tls
from trainer.exchange.transport.client import WorkerClient
from trainer.exchange.transport.link import Link
from trainer.exchange.worker.session import Event, Session
from trainer.model.layout import GradientLayout
from trainer.replica.backend import ReplicaChoice
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.run.composition import roles
from trainer.run.composition import run as build
from trainer.run.inputs import read_inputs
from trainer.system.errors import TrainerError

CLASSES = 5


class LinearReplica:
    """loss(sample) = <w, d(sample)> / N: its gradient, up to 1/N, does not depend on the weights.

    So the moments of the optimizer are linear in what every sample contributed, and a sample that
    was lost or counted twice shows in them however long ago it was.
    """

    device = "cpu"

    def __init__(self, layout: GradientLayout, seconds_per_sample: float = 0.0) -> None:
        self.layout = layout
        draw = np.random.Generator(np.random.Philox(7))
        self._directions = draw.uniform(-1, 1, (CLASSES, layout.size)).astype(np.float32)
        self._seconds = seconds_per_sample
        self._weights = np.zeros(layout.size, np.float32)

    def write_trainable(self, flat: np.ndarray) -> None:
        self._weights[...] = flat

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        began = time.monotonic()
        gradient = self.gradient(batch)
        pause = self._seconds * len(batch) / len(self.layout.blocks)
        for index in self.layout.send_order:
            time.sleep(pause)
            block = self.layout.blocks[index]
            on_block(index, gradient[block.start : block.stop])
        tokens = sum(len(sample.input_ids) for sample in batch)
        return StepResult(self._loss(gradient), len(batch), tokens, time.monotonic() - began)

    def gradient(self, batch: Sequence[Encoded]) -> np.ndarray:
        """Return the sum of the samples' gradients, fp32 `[N]`."""
        scales = np.zeros(CLASSES, np.float32)
        for sample in batch:
            # Different for every text, so that no two samples could stand in for each other.
            scales[sample.labels] += np.float32(1 + zlib.crc32(sample.input_ids.tobytes()) / 2**32)
        return scales @ self._directions

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        table = [[0] * CLASSES for _ in range(CLASSES)]
        for sample in batch:
            table[int(sample.labels)][0] += 1  # pyright: ignore[reportArgumentType]
        return EvalResult(self._loss(self.gradient(batch)), len(batch), table)

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        raise NotImplementedError(prompts, new_tokens, stop)  # no run of it has prompts

    def _loss(self, gradient: np.ndarray) -> float:
        return float(np.dot(self._weights.astype(np.float64), gradient)) / gradient.size


def expected_moments(run_file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return both moments after a run of LinearReplicas in which every sample counted once."""
    settings = run.load_config(run_file)
    inputs = read_inputs(settings, "any")
    replica, train = LinearReplica(inputs.layout), _dataset(settings)
    size, seed = settings.training.batch_size, settings.training.seed
    beta1, beta2 = settings.optimizer.beta1, settings.optimizer.beta2
    first, second = np.zeros(inputs.layout.size), np.zeros(inputs.layout.size)
    done = 0
    for epoch in range(settings.training.epochs):
        order = permute_epoch(seed, epoch, len(train))
        for start in range(0, len(train), size):
            if done == (settings.training.max_steps or math.inf):
                break
            batch = [train[int(index)] for index in order[start : start + size]]
            mean = replica.gradient(batch).astype(np.float64) / len(batch)
            first = beta1 * first + (1 - beta1) * mean
            second = beta2 * second + (1 - beta2) * mean**2
            done += 1
    return first, second


class FaultyClient(WorkerClient):
    """A WorkerClient whose process fails at an exact point of an exact step."""

    faults: argparse.Namespace
    _sent = 0
    _halve = False

    def next_event(self) -> Event | None:
        event = super().next_event()
        if isinstance(event, ShardAssignment):
            self._sent = 0
            if self.faults.stall and event.step == int(self.faults.stall[0]):
                time.sleep(float(self.faults.stall[1]))
                self.faults.stall = None
            if self.faults.gate and event.step == int(self.faults.gate[0]):
                while not Path(self.faults.gate[1]).exists():
                    time.sleep(0.01)
        return event

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: np.ndarray, weight: int
    ) -> None:
        if self.faults.nan == shard.step and index == self._layout.send_order[0]:
            gradient = gradient.copy()
            gradient[5] = np.nan
        first = index == self._layout.send_order[0]
        self._halve = first and self.faults.half and shard.step >= int(self.faults.half[0])
        super().send_block(shard, index, gradient, weight)
        self._sent += 1
        if self.faults.die == [str(shard.step), "block"] and self._sent == 1:
            self._die()

    def send(self, message: Message, step: int) -> None:
        super().send(message, step)
        if isinstance(message, ShardResult) and self.faults.die == [str(step), "uploaded"]:
            self._die()

    def _post_frames(self, session: Session, frames: Iterable[Frame]) -> None:
        super()._post_frames(session, self._halved(frames))

    def _halved(self, frames: Iterable[Frame]) -> Iterable[Frame]:
        if not self._halve:
            return frames
        whole = list(frames)
        if all(frame.type not in TENSOR_TYPES for frame in whole):
            return whole
        fault, link = self.faults.half[1], self._link
        self._halve, self.faults.half = False, None
        return halves(whole, lambda: fail(fault, link))

    def _on_closed(self, link: Link, reason: str) -> None:
        logging.info("lost the coordinator: %s", reason)
        super()._on_closed(link, reason)

    def _die(self) -> None:
        """Die as soon as the socket took all that was sent."""
        asyncio.run_coroutine_threadsafe(self._die_when_sent(), self._loop).result()

    async def _die_when_sent(self) -> None:
        link = self._link
        assert link is not None
        while not link.is_idle:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def _dataset(settings: run.RunConfig) -> Dataset:
    return load_dataset(
        Path(settings.data.train),
        Path(settings.model.path),
        settings.task,
        settings.num_classes,
        settings.data.max_seq_len,
    )


def _parse() -> argparse.Namespace:
    def pair(text: str) -> list[str]:
        return text.split(":", 1)

    parser = argparse.ArgumentParser()
    parser.add_argument("run_file", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("rank", type=int)
    parser.add_argument("address")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0, help="a sample takes")
    parser.add_argument("--die", type=pair, metavar="STEP:block|uploaded")
    parser.add_argument("--stall", type=pair, metavar="STEP:SECONDS")
    parser.add_argument("--half", type=pair, metavar="STEP:kill|stall|cut|nothing")
    parser.add_argument("--gate", type=pair, metavar="STEP:FILE", help="waits for a file")
    parser.add_argument("--nan", type=int, metavar="STEP")
    parser.add_argument("--claim", type=pair, action="append", default=[], metavar="FIELD:VALUE")
    parser.add_argument("--protocol", type=int)
    return parser.parse_args()


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    flags = _parse()
    if flags.protocol:
        wire.PROTOCOL_VERSION = flags.protocol
    settings = run.load_config(flags.run_file)
    inputs = read_inputs(settings, flags.run_id)
    choice = ReplicaChoice(LinearReplica(inputs.layout, flags.seconds), "cpu", "")
    request = build.make_request(inputs, choice, flags.rank)
    claims: dict[str, Any] = dict(flags.claim)
    FaultyClient.faults = flags

    def connect() -> FaultyClient:
        return FaultyClient(
            tls.parse_address(flags.address, "address"),
            request.model_copy(update=claims),
            inputs.layout,
            codec=settings.exchange.codec,
            folder=flags.tls,
            patience=settings.exchange.join_deadline,
            rounds=settings.exchange.has_rounds,
        )

    worker = build.make_worker(inputs, choice, connect)
    roles.interrupt_on_signals(worker.interrupt)
    try:
        end = worker.run()
    except TrainerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(end.reason, file=sys.stderr)
    return end.exit_code


if __name__ == "__main__":
    sys.exit(main())
