"""The control messages: strict JSON, at most 64 KiB, checked field by field.

Tensors travel in frames of their own (`wire.TENSOR_TYPES`); their shapes come from the layout
agreed at join, never from a message.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainer.data.metrics import Figures
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.errors import ProtocolError

Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**16)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""Thirty years at most: sums and squares of it are finite."""
Watts = Annotated[float, Field(ge=0, le=1e6)]
Kind = Literal["train", "evaluate", "generate"]
"""Task of a worker: on samples, or on prompts."""
Size = Annotated[float, Field(ge=0, le=1e60)]
"""A norm of fp32 values, or a factor: its square is a finite float64."""


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
    """Id of the run."""
    rank: Rank | None
    """Requested rank; null: the lowest free one."""
    motley_version: Line
    """Version of Motley; it must be the coordinator's."""
    config_digest: Line
    """Digest of the settings that all members share."""
    layout_digest: Line
    """Digest of the gradient layout."""
    model_digest: Line
    """Digest of the model's config, weights and tokenizer."""
    data_digest: Line
    """Digest of all data."""
    host: Line
    """Name of the worker's host."""
    backend: Line
    """Its backend, such as `cuda`."""
    device: Line
    """Its device, such as `cuda:0`."""
    backend_reason: Line = ""
    """Why no earlier backend of the chain serves; empty for the first."""
    transport: Line = ""
    """How it is connected: `shared memory`, `TLS` or `TCP`."""


class JoinAccepted(Message):
    """The worker is admitted; weights and, past step 0, moments follow as STATE frames."""

    type = MessageType.JOIN_ACCEPTED
    rank: Rank
    """Rank of the worker."""
    generation: Count
    """Generation that its frames carry."""
    step: Count
    """Updates that are in the state that follows."""
    has_moments: bool
    """Whether both moments follow the weights."""
    heartbeat: Seconds
    """Seconds between two heartbeats."""
    lost_after: Seconds
    """Seconds of silence after which a member is lost."""


class JoinRefused(Message):
    """The worker is not admitted; `retry` is true if trying again can help."""

    type = MessageType.JOIN_REFUSED
    reason: Text
    """Why, in one line."""
    retry: bool
    """Whether trying again can help."""


class StateLoaded(Message):
    """The joiner proves that it holds the coordinator's weights and moments."""

    type = MessageType.STATE_LOADED
    step: Count
    """Updates that are in the state."""
    digest: Text
    """BLAKE3 of weights, moments if they were sent, and the step as u64."""


class GenerationRequest(BaseModel):
    """Prompts to answer, as token ids: the likeliest token each time."""

    model_config = _STRICT
    prompts: tuple[tuple[Count, ...], ...]
    """Token ids of each prompt."""
    max_new_tokens: Count
    """Most new tokens of an answer."""
    stop_tokens: tuple[Count, ...]
    """Tokens that end an answer."""


class ShardAssignment(Message):
    """The samples that one worker takes: positions `start..stop` of this step's order."""

    type = MessageType.SHARD_ASSIGNMENT
    kind: Kind
    """The work to do."""
    shard: Count
    """Number of the shard."""
    step: Count
    """Step, counted from 0."""
    epoch: Count
    """Epoch whose order of samples counts."""
    start: Count
    """First sample of the shard."""
    stop: Count
    """Sample after its last one."""
    missing_blocks: tuple[Count, ...] | None = None
    """Blocks still missing of a reassigned shard; null: all."""
    global_batch_size: Count = 0
    """Samples of the whole step."""
    in_bf16: bool = False
    """Whether to send gradients in bf16, with all residuals, instead of a quantised codec."""
    inner_batch_size: Count = 0
    """Samples of one inner step of a round, about."""
    time_limit: Seconds | None = None
    """Seconds after which a round begins no further inner step; null: none."""
    generation_request: GenerationRequest | None = None
    """The prompts to generate for."""


class PartialShard(Message):
    """A shard ends early: the blocks that follow cover only its first samples."""

    type = MessageType.PARTIAL_SHARD
    shard: Count
    """Number of the shard."""
    samples: Count
    """Finished samples, from its first one on."""


class ShardResult(Message):
    """A shard is computed; its gradients went before."""

    type = MessageType.SHARD_RESULT
    shard: Count
    """Number of the shard."""
    loss_sum: float | None
    """Sum of the losses; null: NaN or Inf."""
    weight: Count
    """Samples, or target tokens, of the shard."""
    tokens: Count
    """Tokens that were computed."""
    compute_seconds: Seconds
    """Seconds in forward and backward, without waiting and exchange."""
    overlap_seconds: Seconds = 0.0
    """Seconds of these after the first gradient was sent."""
    watts: Watts | None = None
    """Mean power of the host since its last reading; null: unknown."""
    residual_norm: Size = 0.0
    """L2 norm of the residual that the worker keeps after this shard."""
    confusion: tuple[tuple[Count, ...], ...] | None = None
    """`confusion[label][prediction]` of a classifier's validation."""
    figures: Figures = {}
    """Sums over the samples by name: a script's own, and rewards of preference pairs."""
    answers: tuple[tuple[Count, ...], ...] | None = None
    """New tokens of each prompt of the request."""


class StepCommit(Message):
    """The step is complete: apply the averaged gradient with these scalars."""

    type = MessageType.STEP_COMMIT
    step: Count
    """Step, counted from 0."""
    loss: float | None
    """Mean loss; null: no token of the step was learned."""
    grad_norm: Size
    """Norm of the averaged gradient."""
    clip_scale: Size
    """Factor for the averaged gradient."""
    learning_rate: Size
    """Learning rate of this update."""
    report_weights: bool
    """Whether to answer with a WeightsReport."""
    residuals_flushed: bool = True
    """Whether no residual is left; a worker drops its own."""
    next_assignment: ShardAssignment | None
    """The next shard; null: none yet."""


class WeightsReport(Message):
    """The digest of a worker's weights after a step."""

    type = MessageType.WEIGHTS_REPORT
    step: Count
    """Step after which these are the weights, counted from 0."""
    digest: Text
    """BLAKE3 of the weights."""


class ReadProgress(BaseModel):
    """How far a process has read its data."""

    model_config = _STRICT
    rank: Rank | None
    """Rank as in the request to join; null: of the coordinator."""
    host: Line
    """Name of the host."""
    count: Count
    """Rows and bytes read so far; it grows."""
    description: Annotated[str, Field(max_length=300), AfterValidator(sanitize_text)]
    """The same for people."""

    def describe_stop(self, name: str) -> str:
        """Return that a process, which did not get further than this, has to be looked at."""
        return (
            f"{name} on {self.host} stalled at {self.description}: check its log, and the disk, "
            "pipe or network folder that it reads"
        )


class Heartbeat(Message):
    """The sender is alive."""

    type = MessageType.HEARTBEAT
    read_progress: ReadProgress | None = None
    """Progress of a process that reads its data before it joins or serves."""


class Leave(Message):
    """A worker leaves after finishing its step."""

    type = MessageType.LEAVE
    reason: Text
    """Why the worker leaves."""


class Shutdown(Message):
    """The run is over for all workers."""

    type = MessageType.SHUTDOWN
    reason: Text
    """Why the run is over."""
    exit_code: Annotated[int, Field(ge=0, le=255)]
    """Exit code of the worker."""


BY_TYPE: dict[MessageType, type[Message]] = {
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
        return BY_TYPE[frame.type].model_validate_json(bytes(frame.payload))
    except KeyError:
        raise ProtocolError(f"{frame.type.name} is not a control message") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The place may hold names that the peer made up: short, and no line breaks.
        where = ".".join(str(part) for part in first["loc"])[:80]
        where = where.encode("unicode_escape").decode()
        raise ProtocolError(f"{frame.type.name}: {where}: {first['msg']}") from None
