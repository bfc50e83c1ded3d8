"""The memory that a replica will need, planned from headers before loading (F-HET-002).

Pure: the launcher uses it to refuse a placement before a process starts, the replica before it
loads the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trainer.config.codec import largest_codec
from trainer.config.exchange import ExchangeConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.run import RunConfig
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import TensorHeader
from trainer.planning.devices import format_gib, size_text
from trainer.planning.logit_chunks import count_logit_chunks, further_chunk_bytes
from trainer.planning.memory import plan_memory_by_part, waiting_activations, waits_on_host
from trainer.planning.resident_layers import HEAD_STREAMED, choose_group, resolve_resident
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import AUTOCAST, FP32, Strategy, TrainingSetup
from trainer.system.errors import InputError

CPU_TOKENS = 1024
"""Most tokens of an automatic micro-batch on a CPU: larger ones exceed the caches (measured)."""
HEAP = 1.6
"""A CPU replica's memory over what is in use, at most: freed tensors that the heap keeps (1.52
for hidden 320, 1.13 for 135M weights; `benchmarks/memory.py --roomy`)."""
BUSY_TOKENS = 4096
"""A micro-batch of this many tokens keeps a GPU busy."""
GROUP_TOKENS = 4096
"""Tokens of a group for which layers need not stay: with so many a processor of 1 TFLOP/s that
reads NF4 at 0.07 GB/s waits for no read."""
HOST_SHARE = 0.25
"""Share of a host's free memory for the groups of one of its accelerators: there are others, and
the base in the page cache."""
USABLE = 0.9
"""Share of free memory that a plan may fill; the rest is fragmentation and libraries' own use."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device."""

    frozen: int
    """Base weights that do not train."""
    trainable: int
    """Trainable weights, fp32."""
    gradients: int
    state: int
    """The optimizer's moments and, of a worker, the averaged gradient, if the device is the host;
    its moments if only these are on the device."""
    workspace: int
    """The largest temporary buffers: logits, a dequantised linear."""
    per_token: int
    """Activations kept for backward, for each token of a micro-batch."""
    sample_tokens: int
    """Tokens of the longest sample: the minimum that must fit."""
    recompute: bool
    """Layers are computed twice, and of their activations one layer's are there at a time."""
    resident: int | None = None
    """Layers whose frozen linears stay in memory; None: all, and no memory to read others into.
    `HEAD_STREAMED`: none, and neither does a frozen head."""
    per_waiting_token: int = 0
    """For each token of the micro-batches that wait in a group, which runs layer by layer; 0: there
    are no groups."""
    waits_on_host: bool = False
    """They wait in the memory of the device's host."""
    logit_chunks: int = 1
    """Chunks of logits for which a head that is read is read once a direction."""

    @property
    def fixed(self) -> int:
        """Everything but activations."""
        return self.frozen + self.trainable + self.gradients + self.state + self.workspace

    @property
    def least(self) -> int:
        """Bytes for one sample at a time."""
        return self.fixed + self.per_token * self.sample_tokens


def make_training_setup(
    config: RunConfig, *, accelerator: bool, recompute: bool, coordinates: bool = False
) -> TrainingSetup:
    """Return what a run config trains, on one sample at a time."""
    narrow = config.resolve_precision(accelerator=accelerator) != "fp32"
    frozen = 2 if config.model.dtype == "bfloat16" else 4
    return TrainingSetup(
        method="qlora" if config.model.quantization == "nf4" else config.method,
        rank=config.lora.lora_rank,
        targets=config.lora.linears,
        experts=config.lora.adapts_experts,
        frozen_a=config.freezes_a,
        adapted_layers=config.lora.adapted_layers,
        dora=config.method == "lora" and config.lora.use_dora,
        whole=config.lora.modules_to_save if config.method == "lora" else (),
        length=config.data.max_seq_len,
        recompute="full" if recompute else "none",
        precision=replace(AUTOCAST if narrow else FP32, frozen=frozen),
        on_host=not accelerator,
        coordinates=coordinates,
        beside_state=_beside_state(config.exchange, coordinates=coordinates),
        packed=config.training.pack,
        classes=config.num_classes,
        taught=config.distillation is not None,
        compared=config.task == "dpo",
        rows=config.rows_per_sample,
    )


def plan_memory(
    model: ModelShape,
    headers: Mapping[str, TensorHeader],
    layout: GradientLayout,
    config: RunConfig,
    *,
    accelerator: bool,
    recompute: bool,
    moments: bool = False,
    coordinates: bool = False,
    evaluates: bool = False,
    resident: int | None = None,
) -> MemoryPlan:
    """Return the plan of one replica.

    Args:
        accelerator: the device has its own memory; else it is the host.
        recompute: gradient checkpointing.
        moments: the optimizer runs on the accelerator too, with its moments.
        coordinates: the process is the run's coordinator too.
        evaluates: nothing is trained: there are neither gradients nor an optimizer.
        resident: layers whose frozen linears stay in memory; None: those of `model.resident`, which
            `auto` leaves at all.
    """
    training = make_training_setup(
        config, accelerator=accelerator, recompute=recompute, coordinates=coordinates
    )
    resident = resolve_resident(config.model.resident, model.layers, resident)
    training = replace(training, resident=resident, evaluates=evaluates)
    trainable = layout.size
    if config.method != "full":
        training = replace(training, adapters=trainable)
    elif evaluates and config.freezes_full(resident):
        trainable = 0
        method = "qlora" if training.method == "qlora" else "lora"
        training = replace(training, method=method, adapters=0)
    if config.training.micro_batch_size != "auto":  # the logits of all of its rows are held
        rows = config.training.micro_batch_size * config.rows_per_sample
        training = replace(training, rows=rows)
    parts = plan_memory_by_part(
        replace(model, counted=_count_elements(headers, config)), training, Strategy(data="motley")
    )
    size = parts.bytes_by_part()
    scaled = (
        8 * max(math.prod(shape) for shape in model.layer_matrices().values())
        if training.dora
        else 0
    )
    trained = 4 * trainable
    reference = trained if config.has_reference else 0  # and its place while it is computed
    on_card = 2 * trained if moments else 0
    state = on_card if accelerator else size["optimizer"]
    return MemoryPlan(
        frozen=math.ceil(sum(part.value for part in parts.weights[:-1])) + reference,
        trainable=trained,
        gradients=0 if evaluates else size["gradients"],
        state=0 if evaluates else state,
        workspace=size["logits"] + size["buffers"] + scaled + reference,
        per_token=math.ceil(size["activations"] / training.tokens),
        sample_tokens=config.data.max_seq_len * config.rows_per_sample,
        recompute=recompute,
        resident=resident,
        per_waiting_token=math.ceil(
            waiting_activations(model, replace(training, waiting=1), Strategy()).value
            if model.separable
            else 0
        ),
        waits_on_host=waits_on_host(training),
    )


def can_stream(config: RunConfig, *, evaluates: bool = False) -> bool:
    """Return whether `model.resident: auto` lets a replica read layers at each use.

    Args:
        evaluates: nothing is trained, so that a full model is frozen, too.
    """
    frozen = evaluates if config.method == "full" else not config.lora.use_dora
    return frozen and config.model.resident == "auto"


def choose_streamed(
    plan: Callable[[int | None], MemoryPlan], layers: int, config: RunConfig, usable: float
) -> MemoryPlan:
    """Return the plan of the resident layers with which a step reads least.

    Args:
        plan: as for `choose_resident`.
        usable: bytes of the device that it may fill.
    """

    def fits_usable(micros: int, some: MemoryPlan) -> bool:
        waiting = 0 if some.waits_on_host else (micros - 1) * some.sample_tokens
        return some.least + waiting * some.per_waiting_token <= usable

    whole = plan(None)
    if fits_usable(1, whole):
        return whole
    most = min(config.training.batch_size, max(1, GROUP_TOKENS // whole.sample_tokens))
    return choose_group(
        lambda _, resident: plan(resident), layers, most, fits_usable, lambda some: some.resident
    )


def share_head_reads(
    plan: MemoryPlan, model: ModelShape, config: RunConfig, usable: float
) -> MemoryPlan:
    """Return a plan that reads the head once for as many chunks of logits as memory is left for.

    Args:
        usable: bytes of the device that it may fill.
    """
    if plan.resident != HEAD_STREAMED:
        return plan
    tokens = busy_tokens(config, accelerator=False)  # at least; more would take this memory
    spare = usable - plan.fixed - tokens * plan.per_token
    chunks = count_logit_chunks(model, tokens, spare)
    more = (chunks - 1) * further_chunk_bytes(model)
    return replace(plan, logit_chunks=chunks, workspace=plan.workspace + more)


def peak_bytes(plan: MemoryPlan, config: RunConfig) -> int:
    """Return the most bytes that a CPU replica has in use in a step."""
    tokens = most_tokens(config)
    most = plan.fixed + tokens * plan.per_token
    if plan.resident is None:
        return most
    shard = config.training.batch_size * plan.sample_tokens
    return most + max(0, shard - tokens) * plan.per_waiting_token


def group_tokens(plan: MemoryPlan, available: int, micro: int) -> int:
    """Return how many tokens run layer by layer together.

    Args:
        available: bytes where micro-batches wait.
        micro: tokens of a micro-batch.
    """
    if not plan.per_waiting_token:
        return micro
    spare = available * HOST_SHARE
    if not plan.waits_on_host:
        spare = available * USABLE - plan.gradients - plan.state - plan.workspace
        spare -= micro * plan.per_token
    return micro + max(0, int(spare)) // plan.per_waiting_token


def fitting_tokens(plan: MemoryPlan, available: int) -> int:
    """Return how many tokens of activations fit what loading leaves free; at least one."""
    spare = available * USABLE - plan.gradients - plan.state - plan.workspace
    return max(1, int(spare) // plan.per_token)


def busy_tokens(config: RunConfig, *, accelerator: bool) -> int:
    """Return the tokens of the micro-batch that a device should have room for.

    A processor is as busy with one sample as with several.
    """
    rows, length = (
        config.training.micro_batch_size,
        config.data.max_seq_len * config.rows_per_sample,
    )
    if rows != "auto":
        return rows * length
    return max(BUSY_TOKENS, length) if accelerator else length


def most_tokens(config: RunConfig) -> int:
    """Return the tokens of the largest micro-batch that a CPU takes."""
    busy = busy_tokens(config, accelerator=False)
    return max(CPU_TOKENS, busy) if config.training.micro_batch_size == "auto" else busy


@dataclass(frozen=True)
class Recomputation:
    """Whether layers are computed twice to save memory."""

    on: bool
    reason: str
    """One line for people, if memory decided."""


def choose_recomputation(
    config: RunConfig, needed: Callable[[], int], available: int, *, accelerator: bool
) -> Recomputation:
    """Return what `training.gradient_checkpointing` comes to on a device.

    Args:
        needed: returns the bytes of a process that keeps all activations of `busy_tokens`.
        available: bytes before loading.
    """
    if config.training.recompute is not None:
        return Recomputation(config.training.recompute, "")
    size, tokens = needed(), busy_tokens(config, accelerator=accelerator)
    on = size > available * USABLE
    return Recomputation(
        on,
        f"gradient checkpointing {'on' if on else 'off'}: with all activations of {tokens:,} tokens"
        f" the run needs {size_text(size)}, {size_text(available)} are free",
    )


def shared_memory_needed(
    model: ModelShape,
    headers: Mapping[str, TensorHeader],
    config: RunConfig,
    world: int,
    *,
    accelerator: bool,
    recompute: bool,
    tokens: int | None = None,
) -> int:
    """Return the bytes of the process that needs most of those that share a model.

    Args:
        tokens: of each micro-batch; default: `busy_tokens`.
    """
    training = make_training_setup(config, accelerator=accelerator, recompute=recompute)
    rows = -(-(tokens or busy_tokens(config, accelerator=accelerator)) // training.length)
    return plan_memory_by_part(
        replace(model, counted=_count_elements(headers, config)),
        replace(training, rows=rows),
        make_strategy(config.parallel, world),
    ).total


def make_strategy(parallel: ParallelConfig, world: int) -> Strategy:
    """Return the section `parallel` of a number of processes as a strategy."""
    return Strategy(
        world=world,
        data=parallel.data,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        stages=parallel.pipeline.stages,
        schedule=parallel.pipeline.schedule,
        microbatches=parallel.pipeline.microbatch_count,
    )


def fits_with_heap(needed: int, available: int) -> bool:
    """Return whether memory suffices if malloc's heap keeps freed activations of a CPU replica."""
    return needed * HEAP <= available * USABLE


def fits_device(plan: MemoryPlan, available: int, tokens: int) -> bool:
    """Return whether a replica with the activations of `tokens` fits a device."""
    return plan.fixed + tokens * plan.per_token <= available * USABLE


def suggest_smaller(
    config: RunConfig,
    resident: int | None,
    *,
    recompute: bool,
    evaluates: bool = False,
    shorter: bool = True,
) -> str:
    """Return the settings by which a replica would need less memory, in words.

    What is frozen already, or read at each use, is no remedy.

    Args:
        resident: layers whose frozen linears stay in memory; None: all.
        recompute: layers are computed twice already.
        evaluates: nothing is trained, so that options take the place of settings.
        shorter: some shorter sample fits.
    """
    streams = resident in (0, HEAD_STREAMED)
    smaller = "a smaller data.max_seq_len" if shorter else "a device with more memory"
    if evaluates:
        smaller = "a smaller --max-seq-len" if shorter else smaller
        return smaller if streams else f"--resident auto or {smaller}"
    if config.method == "full":
        smaller = f"method lora, model.quantization nf4 or {smaller}"
    elif resident is not None and not streams:
        smaller = f"model.resident 0 or {smaller}"
    # Two layers on their way are smaller in NF4, too.
    elif not (streams and shorter) and config.model.quantization != "nf4":
        smaller = f"model.quantization nf4 or {smaller}"
    if recompute or not shorter:
        return smaller
    return f"{smaller}, or training.gradient_checkpointing on"


def check_fits(plan: MemoryPlan, available: int, device: str, smaller: str) -> None:
    """Refuse a plan that exceeds a device's memory.

    Args:
        smaller: what needs less, in words.

    Raises:
        InputError: names the needed and the available memory.
    """
    if not fits_device(plan, available, plan.sample_tokens):
        raise InputError(
            f"{device}: the run needs {format_gib(plan.least)} GiB (base"
            f" {format_gib(plan.frozen)}, trainable"
            f" {format_gib(plan.trainable + plan.gradients + plan.state)}, one"
            f" sample {format_gib(plan.least - plan.fixed + plan.workspace)}),"
            f" {format_gib(available)} are free; use {smaller}"
        )


def _beside_state(exchange: ExchangeConfig, *, coordinates: bool) -> float:
    """Return what the exchange holds beside the state, in bytes a trained element.

    In rounds a worker has three vectors of its own, and what a codec with feedback drops. In one
    process averages that are not in fp32 stay encoded, and of rounds there are a sum and an
    average.
    """
    kind = largest_codec(exchange.codec)
    if exchange.has_rounds:
        residual = 4 if kind.needs_feedback else 0
        return 12 + (8 if coordinates else residual)
    return kind.element_bytes if coordinates and not kind.is_exact else 0


def _count_elements(headers: Mapping[str, TensorHeader], config: RunConfig) -> int:
    """Return the elements of the base; a classifier has a head of its own."""
    heads = ("lm_head.weight", "score.weight") if config.task == "classify" else ()
    return sum(math.prod(header.shape) for name, header in headers.items() if name not in heads)
