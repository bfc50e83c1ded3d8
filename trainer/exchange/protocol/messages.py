"""The control messages: strict JSON, at most 64 KiB, checked field by field.

Tensors travel in frames of their own (`wire.TENSOR_TYPES`); their shapes come from the layout
agreed at join, never from a message.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainer.data.metrics import FIGURE_NAME, MOST_FIGURES
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.errors import ProtocolError
from trainer.system.untrusted_data import LARGEST_FLOAT

Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**16)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""Thirty years at most: sums and squares of it are finite."""
Watts = Annotated[float, Field(ge=0, le=1e6)]
Kind = Literal["train", "evaluate", "generate"]
"""What a worker does with samples, or with prompts."""
Size = Annotated[float, Field(ge=0, le=1e60)]
"""A norm of fp32 values, or a factor: its square is a finite float64."""

Figure = Annotated[float, Field(gt=-LARGEST_FLOAT, lt=LARGEST_FLOAT)]
Named = tuple[Annotated[str, Field(pattern=FIGURE_NAME)], Figure]


def _check_line(text: str) -> str:
    if sanitize_text(text) != text:
        raise ValueError("line ends or control characters")
    return text


Text = Annotated[str, Field(max_length=1000), AfterValidator(sanitize_text)]
"""A text that may quote anything: one line, whatever was sent."""
Line = Annotated[str, Field(max_length=1000), AfterValidator(_check_line)]
"""A text that is logged as it comes: one line without control characters."""


_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Message(BaseModel):
    """A control message; subclasses name their type on the wire."""

    model_config = _STRICT
    type: ClassVar[MessageType]

    def to_frame(self, generation: int, step: int = 0, rank: int = 0) -> Frame:
        """Return the message as a frame."""
        return Frame(self.type, self.model_dump_json().encode(), generation, step, rank)


SHARED_MEMORY = "shared memory"
"""The transport of a worker on the coordinator's host."""


class JoinRequest(Message):
    """A worker asks to be a member and proves that it runs the same job."""

    type = MessageType.JOIN_REQUEST
    run_id: Line
    rank: Rank | None
    """None asks for the lowest free rank."""
    motley_version: Line
    config_digest: Line
    layout_digest: Line
    model_digest: Line
    data_digest: Line
    host: Line
    backend: Line
    device: Line
    backend_reason: Line = ""
    """Why no earlier backend of the chain serves; empty for the first."""
    transport: Line = ""
    """How it is connected, for the log."""


class JoinAccepted(Message):
    """The worker is admitted; weights and, past step 0, moments follow as STATE frames."""

    type = MessageType.JOIN_ACCEPTED
    rank: Rank
    generation: Count
    step: Count
    has_moments: bool
    heartbeat: Seconds
    lost_after: Seconds


class JoinRefused(Message):
    """The worker is not admitted; `retry` is true if trying again can help."""

    type = MessageType.JOIN_REFUSED
    reason: Text
    retry: bool


class StateLoaded(Message):
    """The joiner proves that it holds the coordinator's weights and moments."""

    type = MessageType.STATE_LOADED
    step: Count
    digest: Text


class GenerationRequest(BaseModel):
    """Prompts to answer, as token ids: the likeliest token each time."""

    model_config = _STRICT
    prompts: tuple[tuple[Count, ...], ...]
    max_new_tokens: Count
    """The most of each answer."""
    stop_tokens: tuple[Count, ...]
    """Tokens that end an answer."""


class ShardAssignment(Message):
    """The samples that one worker takes: positions `start..stop` of this step's order."""

    type = MessageType.SHARD_ASSIGNMENT
    kind: Kind
    shard: Count
    step: Count
    epoch: Count
    start: Count
    stop: Count
    missing_blocks: tuple[Count, ...] | None = None
    """Only these blocks are still missing (a re-dealt shard); None for all."""
    global_batch_size: Count = 0
    """Samples of the whole step."""
    flush_residuals: bool = False
    """Whether to send all residuals, as bf16."""
    inner_batch_size: Count = 0
    """Of a round: samples of one inner step, about."""
    time_limit: Seconds | None = None
    """Of a round: seconds after which no further inner step is begun; None for no limit."""
    generation_request: GenerationRequest | None = None
    """The prompts to `generate` for."""


class PartialShard(Message):
    """A shard ends early: the blocks that follow cover only its first samples."""

    type = MessageType.PARTIAL_SHARD
    shard: Count
    samples: Count


class ShardResult(Message):
    """A shard is computed; its gradients went before."""

    type = MessageType.SHARD_RESULT
    shard: Count
    loss_sum: float | None
    """None when the loss is NaN or Inf, which JSON cannot say."""
    weight: Count
    tokens: Count
    compute_seconds: Seconds
    """Seconds in forward and backward, without waiting and exchange."""
    overlap_seconds: Seconds = 0.0
    """Of these, the seconds after the first gradient was handed over: they hide the exchange."""
    watts: Watts | None = None
    """Mean power of the worker's host since its last reading; None: nothing measures it."""
    residual_norm: Size = 0.0
    """The L2 norm of what the worker owes after this shard: what is lost with it."""
    confusion: tuple[tuple[Count, ...], ...] | None = None
    """`confusion[label][prediction]`, for evaluation of a classifier."""
    rewards: tuple[Figure, Figure, Count] | None = None
    """Of pairs: `trainer.data.metrics.Rewards`; None also if one is no `Figure`."""
    figures: Annotated[tuple[Named, ...], Field(max_length=MOST_FIGURES)] = ()
    """Of a script's validation: sums over the samples by name."""
    answers: tuple[tuple[Count, ...], ...] | None = None
    """New tokens of each prompt of the `generation_request`."""


class StepCommit(Message):
    """The step is complete: apply the averaged gradient with these scalars."""

    type = MessageType.STEP_COMMIT
    step: Count
    loss: float | None
    """None: no token of the step was learned."""
    grad_norm: Size
    clip_scale: Size
    learning_rate: Size
    report_weights: bool
    """Whether to answer with a WeightsReport."""
    residuals_flushed: bool = True
    """Whether no residual is left now; a worker drops what it could not send."""
    next_assignment: ShardAssignment | None


class WeightsReport(Message):
    """The digest of a worker's weights after a step."""

    type = MessageType.WEIGHTS_REPORT
    step: Count
    digest: Text


class ReadProgress(BaseModel):
    """How far a process has read its data."""

    model_config = _STRICT
    rank: Rank | None
    """As in its request to join; None of the coordinator."""
    host: Line
    count: Count
    """Rows and bytes that it has read so far: it makes progress while this grows."""
    description: Annotated[str, Field(max_length=300), AfterValidator(sanitize_text)]
    """The same for people."""

    def describe_stop(self, name: str) -> str:
        """Return that a process, which did not get further than this, has to be looked at."""
        return (
            f"{name} on {self.host} got no further than {self.description}: look at its log, and at"
            " the disk, pipe or network folder that it reads"
        )


class Heartbeat(Message):
    """The sender is alive."""

    type = MessageType.HEARTBEAT
    read_progress: ReadProgress | None = None
    """Of a worker that has not joined, or of the coordinator before it serves."""


class Leave(Message):
    """A worker leaves after finishing its step."""

    type = MessageType.LEAVE
    reason: Text


class Shutdown(Message):
    """The run is over for all workers."""

    type = MessageType.SHUTDOWN
    reason: Text
    exit_code: Annotated[int, Field(ge=0, le=255)]


_BY_TYPE: dict[MessageType, type[Message]] = {
    message.type: message
    for message in (
        JoinRequest,
        JoinAccepted,
        JoinRefused,
        StateLoaded,
        ShardAssignment,
        PartialShard,
        ShardResult,
        StepCommit,
        WeightsReport,
        Heartbeat,
        Leave,
        Shutdown,
    )
}


def parse_message(frame: Frame) -> Message:
    """Return the control message of a frame.

    Raises:
        ProtocolError: the payload is not exactly such a message.
    """
    try:
        return _BY_TYPE[frame.type].model_validate_json(bytes(frame.payload))
    except KeyError:
        raise ProtocolError(f"{frame.type.name} is not a control message") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The place may hold names that the peer made up: short, and no line breaks.
        where = ".".join(str(part) for part in first["loc"])[:80]
        where = where.encode("unicode_escape").decode()
        raise ProtocolError(f"{frame.type.name}: {where}: {first['msg']}") from None
