"""Layers of a frozen base that are read at each use: from how many tokens on that costs nothing.

A layer is read once in the forward and once in the backward of a pass, which is a group of
micro-batches, beside the computing of the layer before. A layer of P weights of b bytes takes
`b P / R` to read and `2 P B / F` to compute forward over B tokens, so reading hides from
`b F / 2 R` tokens on, and in backward, with recomputation, from half of them. A device with one
queue (Vulkan) copies a layer before it computes it: that takes `b P / L` over a link of L bytes a
second, once a direction and pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainer.planning.devices import PCIE, HostPool, LayerSource
from trainer.planning.logit_chunks import LOGIT_ELEMENTS, count_logit_chunks
from trainer.planning.memory import MemoryParts, waiting_activations, waits_on_host
from trainer.planning.replica import CPU_TOKENS, GROUP_TOKENS, HOST_SHARE
from trainer.planning.resident_layers import (
    HEAD_STREAMED,
    choose_group,
    describe_residents,
    stream_head,
)
from trainer.planning.shapes import ModelShape
from trainer.planning.stored_layers import head_bytes, layer_bytes, reads_head
from trainer.planning.strategy import Strategy, TrainingSetup
from trainer.planning.time import find_speed, flops_per_token, forward_flops_per_token
from trainer.planning.vulkan_buffers import CHUNK_ROWS
from trainer.planning.vulkan_workers import plan_device_memory
from trainer.planning.workers import device_room
from trainer.system.backends import BACKENDS

NVME_RATE = 3e9
"""Bytes a second that an NVMe disk reads, of advice: PCIe 3.0 x4 in practice."""
HIDDEN = 0.95
"""Part of the computing speed from which reading is not worth a remedy."""


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """Passes of a model of which some layers are read at each use."""

    source: LayerSource
    resident: int
    layers: int
    tokens: int
    """Tokens of a group of micro-batches, for which each layer is read once a direction."""
    read: float
    """Seconds to read all layers that do not stay."""
    forward: float
    """Seconds to compute a forward."""
    backward: float
    """Seconds to compute the rest of a pass; 0: there is no backward."""
    copy: float = 0.0
    """Seconds to copy those layers, if the device computes nothing meanwhile."""
    head: float = 0.0
    """Seconds to read the head for its chunks of logits, or to copy it, beyond its products'."""

    @property
    def directions(self) -> tuple[float, ...]:
        """Seconds to compute each direction of a pass."""
        return tuple(each for each in (self.forward, self.backward) if each)

    @property
    def seconds(self) -> float:
        """Seconds of a pass."""
        return sum(max(each + self.copy, self.read) for each in self.directions) + self.head

    @property
    def speed(self) -> float:
        """The part of the computing speed that is left."""
        return (self.forward + self.backward) / self.seconds

    @property
    def hidden_from(self) -> int:
        """Tokens of a pass from which reading costs nothing."""
        return math.ceil(self.tokens * self.read / self.forward)

    @property
    def text(self) -> str:
        """Where layers are read, and from how many tokens on that is free."""
        text = f"{describe_residents(self.resident, self.layers)} from {self.source.text}"
        text += f"; free from {self.hidden_from:,} tokens a pass"
        if self.copy:
            copies = len(self.directions) * self.copy / self.seconds
            text += f" but for copies, {copies:.2g} of its time"
        return text

    def describe(self, more: str = "") -> str:
        """Return the text with the tokens of a pass, and the bound and its remedies if they wait.

        Args:
            more: a setting that makes passes so large, if one does.
        """
        text = self.text
        if self.speed >= HIDDEN:
            return f"{text}, and it has {self.tokens:,}"
        ways = ["move the model to NVMe"] if self.is_slow_disk else []
        ways += [more] if more and not self.head else []  # a chunk of logits has no more tokens
        advice = f"; {', or '.join(ways)}" if ways else ""
        return f"{text}: with {self.tokens:,} {self.speed:.2g} of computing speed{advice}"

    @property
    def is_slow_disk(self) -> bool:
        """Whether an NVMe disk would read faster."""
        return self.source.name == "the disk" and self.source.rate < NVME_RATE


def plan_reading(
    shape: ModelShape,
    training: TrainingSetup,
    flops: float,
    source: LayerSource,
    feed: float = PCIE,
) -> ReadingPlan | None:
    """Return the plan of passes of a training, or of forwards alone; None if all layers stay.

    Args:
        flops: operations a second that products reach.
        feed: bytes a second from the host's memory to the device.
    """
    if training.resident is None:
        return None
    tokens = training.tokens + training.waiting
    forward = forward_flops_per_token(shape, training.length).value * tokens / flops
    size = (shape.layers - max(0, training.resident)) * layer_bytes(shape, training)
    head = 0.0
    if reads_head(training):
        passes = 1 if training.evaluates else 3 if training.compared else 2
        chunks = math.ceil(training.tokens * shape.vocab / LOGIT_ELEMENTS)
        chunks = math.ceil(chunks / training.logit_chunks)
        if training.one_queue:
            chunks = math.ceil(training.tokens / CHUNK_ROWS)
        read = passes * chunks * tokens / training.tokens * head_bytes(shape)
        products = 2 * passes * shape.table_parameters * tokens / flops
        copies = read / feed if training.one_queue else 0.0
        head = max(copies, read / source.rate - products)
    return ReadingPlan(
        source=source,
        resident=training.resident,
        layers=shape.layers,
        tokens=tokens,
        read=size / source.rate,
        forward=forward,
        backward=0.0
        if training.evaluates
        else flops_per_token(shape, training).value * tokens / flops - forward,
        copy=size / feed if training.one_queue else 0.0,
        head=head,
    )


def explain_unstreamed(shape: ModelShape, pool: HostPool) -> str:
    """Return why the devices of a pool keep all layers of a model; empty if they need not."""
    backend = pool.device.backend
    if BACKENDS[backend].has_torch or shape.is_decoder:
        return ""
    if shape.experts > 1:
        return f"{backend} computes no mixtures of experts"
    return f"{backend} computes only what Motley's own decoder does"


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The workers on the devices of one pool."""

    pool: HostPool
    training: TrainingSetup
    memory: MemoryParts
    rate: float | None
    """Tokens a second of one; None: the device's speed is unknown."""
    reading: ReadingPlan | None
    """None: all layers stay, or the device's speed is unknown."""
    layers: int
    refused: str
    """Why it cannot read layers, if it must."""

    @property
    def room(self) -> int:
        """Bytes that it may use."""
        return device_room(self.pool.device).usable

    @property
    def fits(self) -> bool:
        """Whether it has the memory."""
        return self.memory.total <= self.room

    def describe(self) -> str:
        """Return the devices, their layers and their speed in words."""
        pool, resident = self.pool, self.training.resident
        where = f"{pool.name}: " if pool.name else ""
        title = f"{where}{pool.title}"
        if not self.fits:
            need = f"{self.memory.total / 2**30:.1f} of {self.room / 2**30:.1f} GiB"
            head = ", a chunk of the head" if resident == HEAD_STREAMED else ""
            return f"{title}: needs {need} for two layers{head} and one row"
        if resident is None:
            text = "all layers resident"
        elif self.reading is None:
            text = describe_residents(resident, self.layers)
        else:
            text = self.reading.describe()
        if self.rate is not None:
            text += f"; {self.rate * pool.count:,.3g} tokens/s"
        return f"{title}: {text}" + (f"; not yet: {self.refused}" if self.refused else "")


def plan_worker(
    shape: ModelShape,
    pool: HostPool,
    trainings: Sequence[TrainingSetup],
    strategy: Strategy,
    efficiency: float,
    rows: int,
) -> WorkerPlan:
    """Return the fastest plan of a worker that fits, else the one that needs least memory.

    Args:
        trainings: settings to try, with all layers.
        rows: of a step.
    """
    room = device_room(pool.device).usable
    host = (pool.main_memory or 0) * HOST_SHARE

    def make_plan(training: TrainingSetup) -> WorkerPlan:
        def plan(micros: int, resident: int | None) -> tuple[TrainingSetup, MemoryParts]:
            waiting = 0 if resident is None else (micros - 1) * training.tokens
            tried = replace(training, resident=resident, waiting=waiting)
            return tried, plan_device_memory(shape, tried, strategy)

        def fits(_: int, one: tuple[TrainingSetup, MemoryParts]) -> bool:
            tried, parts = one
            waiting = 0.0
            if waits_on_host(tried):
                waiting = waiting_activations(shape, tried, strategy).value
            return parts.total <= room and waiting <= host

        most = max(1, min(rows * training.length, GROUP_TOKENS) // training.tokens)
        if not shape.separable:
            most = 1
        chosen, memory = choose_group(plan, shape.layers, most, fits, lambda one: one[0].resident)
        if chosen.resident == 0:
            chosen, memory = stream_head(
                (chosen, memory), partial(plan, 1), lambda one: one[1].total, room
            )
        if reads_head(chosen) and not chosen.one_queue:
            chunks = count_logit_chunks(shape, chosen.tokens, room - memory.total)
            chosen = replace(chosen, logit_chunks=chunks)
            memory = plan_device_memory(shape, chosen, strategy)
        peak = find_speed(pool.device, chosen)
        rate = reading = None
        if peak is not None:
            flops = peak * efficiency
            source = pool.find_source(shape.layers * layer_bytes(shape, chosen))
            reading = plan_reading(shape, chosen, flops, source, pool.feed)
            rate = flops / flops_per_token(shape, chosen).value
            rate *= 1 if reading is None else reading.speed
        refused = "" if chosen.resident is None else explain_unstreamed(shape, pool)
        return WorkerPlan(
            pool=pool,
            training=chosen,
            memory=memory,
            rate=rate,
            reading=reading,
            layers=shape.layers,
            refused=refused,
        )

    tried = [make_plan(training) for training in trainings]
    fitting = [one for one in tried if one.fits]
    if not fitting:
        return min(tried, key=lambda one: one.memory.total)
    usual = fitting = [
        # Layers are computed twice before one is read, unless that is switched off.
        one
        for one in fitting
        if one.training.resident is None or one.training.recompute == "full"
    ] or fitting
    if pool.device.is_processor:  # as `training.micro_batch_size: auto`
        most = max(CPU_TOKENS, min(one.training.tokens for one in fitting))
        usual = [one for one in fitting if one.training.tokens <= most]
    return max(usual, key=lambda one: (one.rate or 0.0, -one.memory.total))


def total_rate(workers: Sequence[WorkerPlan]) -> float | None:
    """Return the tokens a second of all workers; None: there are none, or a speed is unknown."""
    rates = [worker.rate and worker.rate * worker.pool.count for worker in workers]
    return sum(filter(None, rates)) if rates and None not in rates else None
