"""A worker process in virtual time: the real Session, and a loop that pauses after every block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from trainer.exchange.protocol.messages import (
    GenerationRequest,
    JoinRequest,
    Message,
    PartialShard,
    ShardAssignment,
    Shutdown,
    WeightsReport,
)
from trainer.exchange.protocol.wire import Frame, FrameDecoder, FrameEncoder, run_tag
from trainer.exchange.worker.session import (
    Admitted,
    Applied,
    Committed,
    Event,
    Session,
    make_result_message,
)
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import TrainState, weights_digest
from trainer.optimizer.nesterov import Update

Float32 = NDArray[np.float32]

MAX_QUEUED = 8 * (4 + 4)
"""Streams that may wait on a link, as `GradientServer` bounds them for four blocks."""


class Pipe:
    """One direction of a connection: frames go in, bytes come out in pieces of any size.

    Like a socket's queue it draws frames only when their bytes are wanted.
    """

    def __init__(self, run_id: str) -> None:
        self.encoder = FrameEncoder(run_tag(run_id))
        self.decoder = FrameDecoder(run_tag(run_id))
        self.last_frame = b""
        self._frames: deque[Iterator[Frame]] = deque()
        self._bytes = bytearray()

    def send(self, frames: Iterable[Frame]) -> None:
        self._frames.append(iter(frames))

    def drop_queued(self) -> None:
        """Forget the frames that were sent and not drawn yet."""
        self._frames.clear()

    def send_raw(self, data: bytes) -> None:
        """Put bytes behind everything that was sent so far."""
        self._draw(None)
        self._bytes += data

    def take(self, count: int | None) -> bytes:
        """Return up to `count` bytes (None for all)."""
        self._draw(count)
        taken = bytes(self._bytes[:count])
        del self._bytes[: len(taken)]
        return taken

    @property
    def queued(self) -> int:
        """Streams that were not drawn whole."""
        return len(self._frames)

    @property
    def full(self) -> bool:
        """Whether more wait than `GradientServer` lets wait."""
        return len(self._frames) > MAX_QUEUED

    @property
    def empty(self) -> bool:
        self._draw(1)
        return not self._bytes

    def received(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete."""
        while data:
            space = self.decoder.free_space()
            count = min(len(space), len(data))
            space[:count] = data[:count]
            data = data[count:]
            if frame := self.decoder.advance(count):
                yield frame

    def _draw(self, count: int | None) -> None:
        while self._frames and (count is None or len(self._bytes) < count):
            frame = next(self._frames[0], None)
            if frame is None:
                self._frames.popleft()
            else:
                self.last_frame = b"".join(self.encoder.encode(frame))
                self._bytes += self.last_frame


class Wire:
    """A connection between one worker and the coordinator."""

    def __init__(self, number: int, run_id: str) -> None:
        self.number = number
        self.up = Pipe(run_id)
        self.down = Pipe(run_id)
        self.closing = False
        """Whether the coordinator closes it once everything was sent."""
        self.cut = False
        """Whether no byte passes any more, and neither side knows."""


class SimulatedWorker:
    """A process that joins, computes, applies; `step()` lets its loop do one small thing."""

    def __init__(
        self, problem: ExactProblem, rank: int | None, request: JoinRequest | None = None
    ) -> None:
        self.problem = problem
        self.request = request or join_request(rank)
        self.alive = True
        self.stalled = False
        self.ended: Shutdown | None = None
        self.refused: str | None = None
        self.seconds_per_sample = 0.01
        self.overlap = 0.0
        """The part of its computing that comes after its first gradient."""
        self.poison: tuple[int, int, float] | None = None
        """(block, offset, value) to put into its next gradient, or (-1, 0, loss)."""
        self.careless = False
        """Whether its loop sends through the membership of the moment, not that of the shard."""
        self.corrupt = False
        """Whether its memory is bad: the next update goes wrong by one bit."""
        self.mute = False
        """Whether it keeps the proofs of its weights to itself."""
        self.hands_in_early = False
        """Whether it takes half of each shard of a round."""
        self.wire: Wire | None = None
        self.session: Session | None = None
        self.heard = self.beat = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget what a process forgets when it dies."""
        self.state: TrainState | None = None
        self.member_of: Session | None = None
        """The membership whose state it holds."""
        self.events: deque[tuple[Session, Event]] = deque()
        self.wire = self.session = None
        self.commits: list[Committed] = []
        self._update = Update(self.problem.config, self.problem.layout)
        self._running = self._loop()

    @property
    def present(self) -> bool:
        """Whether the process is there and runs."""
        return not self.gone and not self.stalled

    @property
    def gone(self) -> bool:
        """Whether there is no process: killed, or left by itself."""
        return not self.alive or self.ended is not None or self.refused is not None

    @property
    def rank(self) -> int | None:
        return self.session.rank if self.session and self.session.accepted else None

    def step(self) -> bool:
        """Do one small piece of work: a block, a result, an update; return whether there was."""
        return next(self._running)

    def send(self, message: Message) -> None:
        """Send a message of the present session, if there is one."""
        if self.session and self.session.accepted:
            self._send(self.session, [self.session.make_frame(message)])

    def post(self, *frames: Frame) -> None:
        """Send frames of any kind, whether or not they make sense."""
        assert self.wire
        self.wire.up.send(frames)

    def _send(self, session: Session, frames: Iterable[Frame]) -> None:
        """Send for a membership; dropped when that membership is gone."""
        if session is self.session and self.wire:
            self.wire.up.send(frames)

    def _sender(self, session: Session) -> Session | None:
        if not self.careless:
            return session
        return self.session if self.session and self.session.accepted else None

    def _loop(self) -> Iterator[bool]:
        while True:
            if not self.events:
                yield False
                continue
            session, event = self.events.popleft()
            if isinstance(event, Shutdown):
                self.ended = event
            elif session is not self.session:
                continue  # of a membership that is gone
            elif isinstance(event, Admitted):
                self.state, self.member_of = event.state, session
            elif isinstance(event, Committed):
                self._apply(session, event)
            elif isinstance(event, Applied):
                raise AssertionError("its state is its own")
            elif event.kind == "train":
                yield from self._train(session, event)
            elif event.generation_request:
                self._answer(session, event, event.generation_request)
            else:
                self._evaluate(session, event)
            yield True

    def _train(self, session: Session, shard: ShardAssignment) -> Iterator[bool]:
        problem = self.problem
        assert self.state is not None
        assert self.state.step == shard.step, "it computes with the weights of another step"
        stop, layout = shard.stop, self._layout(shard.step)
        assert bool(shard.inner_batch_size) == self.problem.plan.is_outer_step(shard.step)
        early = (
            self.hands_in_early and shard.missing_blocks is None and shard.stop - shard.start > 1
        )
        if shard.inner_batch_size and early:
            stop = (shard.start + shard.stop) // 2
            message = PartialShard(shard=shard.shard, samples=stop - shard.start)
            if sender := self._sender(session):
                self._send(sender, [sender.make_frame(message, shard.step)])
        total = problem.shard_blocks(shard.epoch, shard.start, stop)
        weight = problem.shard_weight(shard.start, stop)
        loss = problem.shard_loss(shard.epoch, shard.start, stop)
        buffer = np.empty(problem.layout.size, np.float32)
        if self.careless:
            yield True  # forward takes a while, and much can happen in it
        order, count = problem.layout.send_order, len(problem.layout.blocks)
        second = () if layout is problem.layout else (count + index for index in order)
        for index in (*order, *second):
            if shard.missing_blocks is not None and index not in shard.missing_blocks:
                continue
            block = layout.blocks[index]
            gradient = buffer[: block.size]
            gradient[...] = total[block.start : block.stop]
            if self.poison and self.poison[0] == index:
                gradient[self.poison[1]] = self.poison[2]
            if sender := self._sender(session):
                self._send(sender, sender.make_block_frames(shard, index, gradient, weight))
            gradient[...] = 777.0  # the array is the replica's own: it changes after the call
            yield True
        if self.poison and self.poison[0] == -1:
            loss = self.poison[2]
        seconds = self.seconds_per_sample * (stop - shard.start)
        result = make_result_message(shard, loss, weight, weight, seconds, self.overlap * seconds)
        if sender := self._sender(session):
            self._send(sender, sender.make_answer_frames(result, shard.step))

    def _layout(self, step: int) -> GradientLayout:
        plan, layout = self.problem.plan, self.problem.layout
        return (
            layout.with_second_moments
            if plan.is_outer_step(step) and plan.flushes_residuals(step)
            else layout
        )

    def _evaluate(self, session: Session, shard: ShardAssignment) -> None:
        assert self.state is not None
        assert self.state.step == shard.step, "it evaluates the weights of another step"
        count = shard.stop - shard.start
        loss = self.problem.shard_loss(0, shard.start, shard.stop)
        table = self.problem.confusion(shard.start, shard.stop)
        result = make_result_message(shard, loss, count, count, 0.01, confusion=table)
        self._send(session, session.make_answer_frames(result, shard.step))

    def _answer(self, session: Session, shard: ShardAssignment, asked: GenerationRequest) -> None:
        assert self.state is not None
        assert self.state.step == shard.step, "it answers with the weights of another step"
        answers = [self.problem.answer(prompt, shard.step) for prompt in asked.prompts]
        self._send(
            session,
            session.make_answer_frames(make_result_message(shard, 0, 0, 1, 9.0, answers=answers)),
        )

    def _apply(self, session: Session, event: Committed) -> None:
        assert self.state is not None
        commit = event.commit
        assert commit.step == self.state.step, "a commit was left out or came twice"
        scalars, plan = (commit.learning_rate, commit.clip_scale), self.problem.plan
        assert event.gradient.size == self._layout(commit.step).size
        self._update.apply(self.state, event.gradient, *scalars, plan.first_outer_step)
        if self.corrupt:
            self.state.weights.view(np.uint32)[3] ^= 1
        self.commits.append(event)
        if commit.report_weights and not self.mute:
            digest = weights_digest(self.state.weights)
            report = WeightsReport(step=commit.step, digest=digest)
            self._send(session, [session.make_frame(report, commit.step)])
