"""A worker's side of the exchange: frames in, events for its loop out. Sans-IO.

One session lasts from a JoinRequest to the loss of the link; a returning worker starts a new one
and whatever the old one still held is void.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config.codec import find_codec
from trainer.exchange.policies.feedback import make_sender_codec
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.blocks import BlockAssembly, make_block_frames
from trainer.exchange.protocol.codecs import Bytes, Codec
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import ShardAssignment, ShardResult, Shutdown, StepCommit
from trainer.exchange.protocol.state_transfer import StateAssembly
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import TrainState
from trainer.system.errors import ProtocolError
from trainer.system.untrusted_data import LARGEST_FLOAT

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Admitted:
    """The worker is admitted with this state, which replaces its previous one."""

    rank: int
    state: TrainState


@dataclass(frozen=True)
class Committed:
    """Apply the averaged gradient, fp32, with the scalars of the commit.

    `[N]`; of a flush round `[2 N]`: behind it the mean of the workers' second moments.
    """

    commit: StepCommit
    gradient: Float32


@dataclass(frozen=True)
class Applied:
    """The coordinator applied a commit to the state that the worker shares with it."""

    commit: StepCommit


Event = Admitted | ShardAssignment | Committed | Applied | Shutdown


class Session:
    """The protocol of one membership."""

    def __init__(
        self,
        request: messages.JoinRequest,
        layout: GradientLayout,
        codec: str,
        rounds: bool = False,
        shared: TrainState | None = None,
    ) -> None:
        """Start before the request to join is sent.

        Args:
            rounds: the second moments may follow a step's averages, as blocks of their own.
            shared: the coordinator's own state, of a worker in the same process: it is the worker's
                too, and averages are applied to it by the coordinator alone.
        """
        self.request = request
        self.shared = shared
        self._wire = layout.with_second_moments if rounds else layout
        self.accepted: messages.JoinAccepted | None = None
        self.reading: messages.ReadProgress | None = None
        """How far the coordinator has read that does not serve yet."""
        self._layout = layout
        self.codec = make_sender_codec(codec, layout, rounds=rounds)
        """The codec of this membership, in outer steps with its residual."""
        self._state: StateAssembly | None = None
        self._partial: dict[int, BlockAssembly] = {}
        self._averaged: set[int] = set()
        self._gradient: Float32 | None = None
        self._dealt: dict[int, ShardAssignment] = {}

    def make_join_frame(self) -> Frame:
        """Return the request to join."""
        return self.request.to_frame(0)

    def receive_frame(self, frame: Frame) -> tuple[list[Event], list[Frame]]:
        """Handle a frame; return events for the loop and frames to answer with.

        Raises:
            ProtocolError: the coordinator sent what makes no sense here.
            RefusalError: it does not let this worker in.
        """
        if self.accepted is None:
            return self._handle_admission(frame), []
        if frame.generation != self.accepted.generation:
            raise ProtocolError(f"{frame.type.name} of another generation")
        if frame.type is MessageType.STATE:
            return self._add_state(frame)
        if frame.type is MessageType.AVERAGED_GRADIENT:
            self._add_average(frame)
            return [], []
        match messages.parse_message(frame):
            case messages.Heartbeat():
                return [], []
            case StepCommit() as commit:
                if self.shared:
                    committed = Applied(commit)
                else:
                    committed = Committed(commit, self._take_gradient(commit))
                self._dealt.clear()
                if commit.residuals_flushed:
                    self.codec.clear_residuals()
                if commit.next_assignment is None:
                    return [committed], []
                self._dealt[commit.next_assignment.shard] = commit.next_assignment
                return [committed, commit.next_assignment], []
            case ShardAssignment() as shard:
                self._dealt[shard.shard] = shard
                return [shard], []
            case Shutdown() as end:
                return [end], []
            case other:
                raise ProtocolError(f"{other.type.name} is not for a worker")

    def make_block_frames(
        self, shard: ShardAssignment, index: int, gradient: Float32, weight: int
    ) -> Iterator[Frame]:
        """Return the frames of one block's gradient sum; the array may change after the call.

        With a shared state an array in fp32 is the only frame's payload, and may not.

        A quantised one is encoded when its first frame is drawn: not by the thread that computes,
        and only if it still counts then.

        Nothing for a shard that was dealt to this worker in an earlier membership: after a restart
        of the coordinator its number may stand for other samples.
        """
        if not self._is_assigned(shard):
            return iter(())
        if self.codec.is_quantized:
            return self._encode_late(shard, index, gradient.copy(), weight)
        if self.shared and find_codec(self.codec.codec.name).is_exact:
            encoded = self.codec.codec, gradient.view(np.uint8)
        else:
            encoded = self.codec.encode(index, gradient)
        return self._split_into_frames(shard, index, *encoded, weight)

    def make_answer_frames(self, message: messages.Message, step: int = 0) -> Iterator[Frame]:
        """Yield a control message as a frame, when all before it was drawn.

        The result of a shard then carries the norm of this worker's residual.
        """
        if self.codec.has_feedback and isinstance(message, ShardResult):
            shard = self._dealt.get(message.shard)
            every = range(len(self._layout.blocks))
            pending = set(every)
            if shard and shard.in_bf16:
                pending -= set(every if shard.missing_blocks is None else shard.missing_blocks)
            message = message.model_copy(update={"residual_norm": self.codec.compute_norm(pending)})
        yield self.make_frame(message, step)

    def make_frame(self, message: messages.Message, step: int = 0) -> Frame:
        """Return a control message as a frame of this session."""
        return message.to_frame(self.generation, step, self.rank)

    @property
    def generation(self) -> int:
        """The membership epoch that this worker was let in with."""
        assert self.accepted is not None
        return self.accepted.generation

    @property
    def rank(self) -> int:
        """This worker's rank."""
        assert self.accepted is not None
        return self.accepted.rank

    def _handle_admission(self, frame: Frame) -> list[Event]:
        match messages.parse_message(frame):
            case messages.JoinAccepted() as accepted:
                self.accepted = accepted
                self._state = StateAssembly(
                    self._layout.size, accepted.step, accepted.has_moments, self.shared
                )
                return []
            case messages.Heartbeat(read_progress=messages.ReadProgress() as reading):
                self.reading = reading
                return []
            case Shutdown() as end:
                return [end]  # it came when the run was over already
            case messages.JoinRefused(reason=reason, retry=retry):
                raise RefusalError(reason, retry)
            case other:
                raise ProtocolError(f"{other.type.name} before JoinAccepted")

    def _add_state(self, frame: Frame) -> tuple[list[Event], list[Frame]]:
        assert self.accepted is not None
        if self._state is None:
            raise ProtocolError("unexpected state")
        state = self._state.add_frame(frame)
        if state is None:
            return [], []
        proof = messages.StateLoaded(step=state.step, digest=self._state.digest)
        self._state = None
        restored = Admitted(self.rank, state)
        return [restored], [self.make_frame(proof, state.step)]

    def _encode_late(
        self, shard: ShardAssignment, index: int, gradient: Float32, weight: int
    ) -> Iterator[Frame]:
        """Encode a block, unless it counts no more, and yield its frames.

        Of one with a residual a further shard in the same step is sent with what the first one
        dropped: once, like that.
        """
        if not self._is_assigned(shard):
            return
        encoded = self.codec.encode(
            index, gradient, in_bf16=shard.in_bf16, batch=shard.global_batch_size
        )
        yield from self._split_into_frames(shard, index, *encoded, weight)

    def _is_assigned(self, shard: ShardAssignment) -> bool:
        dealt = self._dealt.get(shard.shard)
        return dealt is shard or dealt == shard  # to compare all fields takes as long as encoding

    def _split_into_frames(
        self, shard: ShardAssignment, index: int, codec: Codec, encoded: Bytes, weight: int
    ) -> Iterator[Frame]:
        kind = MessageType.GRADIENT
        number, step, chunk = shard.shard, shard.step, encoded.size if self.shared else None
        return make_block_frames(
            kind, encoded, self.generation, step, index, codec, weight, self.rank, number, chunk
        )

    def _add_average(self, frame: Frame) -> None:
        if frame.block >= len(self._wire.blocks) or frame.block in self._averaged:
            raise ProtocolError(f"unexpected average of block {frame.block}")
        span = self._wire.blocks[frame.block]
        assembly = self._partial.get(frame.block)
        if assembly is None:
            codec = self.codec.find_codec(frame.codec)
            assembly = BlockAssembly(codec, span.size, frame.weight)
            self._partial[frame.block] = assembly
        if assembly.add_frame(frame):
            del self._partial[frame.block]
            if self._gradient is None:
                self._gradient = np.empty(self._wire.size, np.float32)
            assembly.codec.decode(assembly.bytes, self._gradient[span.start : span.stop])
            self._averaged.add(frame.block)

    def _take_gradient(self, commit: StepCommit) -> Float32:
        due, here = (len(self._layout.blocks), len(self._wire.blocks)), len(self._averaged)
        if here not in due or max(self._averaged) >= here:
            raise ProtocolError(f"step {commit.step} was committed before all averages had arrived")
        # A worker without a share can be a step ahead of its loop: each step has its own array.
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        self._averaged.clear()
        return gradient[: self._wire.blocks[here - 1].stop]


def make_result_message(
    shard: ShardAssignment,
    loss_sum: float,
    weight: int,
    tokens: int,
    seconds: float,
    overlap: float = 0.0,
    confusion: list[list[int]] | None = None,
    answers: list[list[int]] | None = None,
    watts: float | None = None,
    figures: dict[str, float] | None = None,
) -> ShardResult:
    """Return the result of a shard as a message; JSON cannot carry a loss that is not finite."""
    return ShardResult(
        shard=shard.shard,
        loss_sum=float(loss_sum) if np.isfinite(loss_sum) else None,
        weight=weight,
        tokens=tokens,
        compute_seconds=seconds,
        overlap_seconds=min(overlap, seconds),
        watts=watts,
        confusion=tuple(map(tuple, confusion)) if confusion is not None else None,
        answers=tuple(map(tuple, answers)) if answers is not None else None,
        figures=figures if figures and np.abs([*figures.values()]).max() < LARGEST_FLOAT else {},
    )
