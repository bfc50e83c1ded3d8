"""The engines that may compute a teacher: which fit, and how fast they score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from trainer.config.run import Quantization
from trainer.config.teacher_engines import TEACHER_ENGINES, EngineFacts
from trainer.planning.device_models import DeviceModel
from trainer.planning.devices import DISK_RATE, PCIE, HostPool, LayerSource
from trainer.planning.forward import (
    ForwardSize,
    forward_bytes,
    frozen_setup,
    plan_forward,
)
from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.planning.resident_layers import (
    HEAD_STREAMED,
    choose_resident,
    describe_residents,
    stream_head,
)
from trainer.planning.shapes import ModelShape
from trainer.planning.stored_layers import NF4_BYTES
from trainer.planning.strategy import AUTOCAST, FP32, TrainingSetup
from trainer.planning.streaming import HIDDEN, plan_reading
from trainer.planning.time import EFFICIENCY, find_speed, forward_flops_per_token
from trainer.planning.vulkan_workers import plan_vulkan_forward
from trainer.planning.workers import Room
from trainer.system.backends import Backend
from trainer.system.errors import InputError

BATCH: Mapping[Backend, int] = {"cpu": 4096, "cuda": 32768, "wgpu": 4096}
"""Tokens of a forward: enough that a large head is rarely read from memory."""
_GGUF_BATCH = 512
"""The most of llama.cpp's: more are not faster, and their activations need memory."""
WINDOW = 1024
"""Default number of tokens of a window."""


class TeacherDevice(NamedTuple):
    """Device or processor that a teacher may compute on."""

    place: Backend
    device: DeviceModel
    pool: HostPool | None = None
    """The device with its host; None: unknown."""

    def find_source(self, size: int) -> LayerSource:
        """Return where layers of a model of so many bytes are read."""
        unknown = HostPool(hosts=1, devices=1, device=self.device, inside=PCIE)
        return (self.pool or unknown).find_source(size)


_STORED = {"float32": "F32", "bfloat16": "BF16"}
_INT8_FIXED = 400 << 20
"""Bytes of OpenVINO, the graph and its compiled code, for a small model as for a large one."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How an engine holds a teacher's weights."""

    engine: str | None
    """Name in `TEACHER_ENGINES`; None: no engine of this version, planned to compare."""
    weights: str
    """Their type: the dtype, or the quantisation."""
    bits: float
    """Bits of a weight, with its part of a scale; in NF4 of linears and experts."""
    file: bool = False
    """They are a file of this format, mapped: read when they are used, and may leave the memory."""

    @property
    def facts(self) -> EngineFacts | None:
        """The facts of the engine; None if it is unknown."""
        return None if self.engine is None else TEACHER_ENGINES.get(self.engine)

    @property
    def is_gguf(self) -> bool:
        """Whether the engine reads GGUF files alone."""
        return self.facts is not None and self.facts.reads_gguf

    @property
    def takes_dtype(self) -> bool:
        """Whether the engine's weights have the type that a job's `dtype` sets."""
        return self.facts is not None and self.facts.takes_dtype

    @property
    def quantization(self) -> Quantization:
        """The one that the engine is asked for."""
        return "nf4" if self.weights == "nf4" else "none"

    @property
    def places(self) -> tuple[Backend, ...]:
        """Where it may be held."""
        return self.facts.backends if self.facts else ("cpu",)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.engine or '-'} {self.weights}"


FORMATS = (
    WeightFormat(engine="torch", weights="float32", bits=32),
    WeightFormat(engine="torch", weights="bfloat16", bits=16),
    WeightFormat(engine="torch", weights="nf4", bits=8 * NF4_BYTES),
    WeightFormat(engine="wgpu", weights="float32", bits=32),
    WeightFormat(engine="wgpu", weights="bfloat16", bits=16),
    WeightFormat(engine="wgpu", weights="nf4", bits=8 * NF4_BYTES),
    WeightFormat(engine="openvino", weights="int8", bits=8),
    # A scale of 16 bits to 32 weights: ggml's block_q8_0 and block_q4_0.
    WeightFormat(engine="gguf", weights="Q8_0", bits=8.5, file=True),
    WeightFormat(engine="gguf", weights="Q4_0", bits=4.5, file=True),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Speeds and sizes that teachers measured while they filled a folder of logits."""

    engine: str
    weights: str
    """As in `WeightFormat`."""
    place: Backend
    vocab_size: int
    """Vocabulary of the teacher, padding included."""
    rates: Mapping[str, float]
    """Tokens a second of each teacher, by name; at least one."""
    bytes_per_token: float | None = None
    """Bytes per token of complete shards; None: there is none yet."""
    kept: tuple[str, int | None] | None = None
    """Scheme and, of `topk`, k: what those bytes are of."""
    bits: float | None = None
    """Bits of a weight in a GGUF file, those of its widest type."""


@dataclass(frozen=True, kw_only=True)
class TeacherOption:
    """A format on the devices of one kind."""

    format: WeightFormat
    place: Backend
    device: str
    weights: int
    """Bytes in memory if all are."""
    working: int
    """Bytes of a forward."""
    least: int
    """Bytes below which it does not run: where weights are mapped, those in use at a time."""
    room: int
    """Bytes of the roomiest device that may be used."""
    fits: Literal["yes", "disk", "streamed", "no"]
    """`disk`: each forward reads weights from their file again; `streamed`: layers, beside the
    computing."""
    refused: str = ""
    """Why not, if memory is not the reason."""
    streamed: str = ""
    """How fast a device that does not hold the teacher scores; empty if it holds it."""
    teachers: int = 0
    rate: float | None = None
    """Tokens a second of all teachers until the last one is done; None: unknown."""
    source: Literal["measured", "given", "computed"] = "computed"

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return self.weights + self.working

    def scoring_seconds(self, tokens: float) -> float | None:
        """Return the time to score so many tokens."""
        return tokens / self.rate if self.rate else None


def gguf_batch(vocab_size: int) -> int:
    """Return the tokens of a forward of llama.cpp, which keeps the logits of all of them."""
    return max(1, min(_GGUF_BATCH, LOGIT_ELEMENTS // vocab_size))


def int8_opening_bytes(weights: int, largest: int, loaded: int = 0) -> int:
    """Return the most main memory that opening OpenVINO's int8 takes; an estimate from above.

    Int8 weights, and once more while they are laid out for the processor; the table of embeddings
    in fp32, and one matrix on its way to int8.

    Args:
        weights: elements of the model.
        largest: elements of its largest matrix.
        loaded: bytes of weights that are not mapped as they are stored.
    """
    return 2 * weights + loaded + 4 * largest + 9 * largest + _INT8_FIXED


def teacher_options(
    shape: ModelShape,
    devices: Sequence[TeacherDevice],
    length: int,
    *,
    given: float | None = None,
    measured: Sequence[Measured] = (),
) -> list[TeacherOption]:
    """Return every format on every kind of device, those of an engine first.

    Teachers split the corpus into equal parts, so that the slowest is waited for: as many of the
    fastest take part as are done first together.

    Args:
        devices: what each teacher may compute on.
        length: tokens of a window.
        given: tokens a second of one teacher, whatever computes it.
        measured: replaces what is computed of the same engine and weights.

    Raises:
        InputError: nothing here is of the kind that a rate was measured on.
    """
    devices_by_place = {
        at: [candidate for candidate in devices if candidate.place == at] for at in BATCH
    }
    found = [
        _make_option(shape, kind, place, devices_by_place[place], length, given)
        for kind in FORMATS
        for place in kind.places
        if devices_by_place[place]
    ]
    for each in measured:
        if not devices_by_place[each.place]:
            raise InputError(
                f"--rate: it was measured on {each.place}, and no teacher here computes there"
            )
        wanted = (each.engine, each.weights, each.place)
        if wanted not in [(one.format.engine, one.format.weights, one.place) for one in found]:
            # A file of other types than those of the table.
            kind = WeightFormat(
                engine=each.engine, weights=each.weights, bits=each.bits or 16, file=True
            )
            found.append(
                _make_option(shape, kind, each.place, devices_by_place[each.place], length, None)
            )
        found = _put_in(found, each)
    return found


def pick_teacher(options: Sequence[TeacherOption]) -> TeacherOption | None:
    """Return the fastest option that an engine computes; a measured one before computed ones.

    Quantised weights are for what is a twentieth slower in any other form, and a GGUF file, which
    the teacher may not be, the last of them.
    """
    able = [one for one in options if one.format.engine is not None and one.fits != "no"]
    fastest = max((one.rate or 0.0 for one in able), default=0.0)

    def rank_option(one: TeacherOption) -> tuple[object, ...]:
        rate = one.rate or 0.0
        near = fastest if rate >= HIDDEN * fastest else rate
        exact = one.format.bits >= 16, not one.format.is_gguf
        return one.source != "computed", near, *exact, rate, -one.least

    return max(able, key=rank_option, default=None)


def _make_option(
    shape: ModelShape,
    kind: WeightFormat,
    place: Backend,
    candidates: Sequence[TeacherDevice],
    length: int,
    given: float | None,
) -> TeacherOption:
    devices = [candidate.device for candidate in candidates]
    if kind.is_gguf and (shape.experts > 1 or not shape.in_gguf):
        kind = replace(kind, engine=None)  # such files are not converted
    wide = kind.weights not in ("bfloat16", "nf4")
    batch = gguf_batch(shape.vocab) if kind.file else max(BATCH[place], length)
    on_card, width = place != "cpu", 4 if wide else 2
    computed = 4 if place == "wgpu" else width
    working = forward_bytes(shape, batch, computed, length, accelerator=on_card)
    if kind.file:
        working += 8 * shape.layers * shape.keys * length  # of a window, in fp32
    weights = int(shape.parameters * kind.bits / 8)
    read = 0  # bytes that are mapped
    facts = kind.facts
    setup, size = frozen_setup(width, kind.quantization), ForwardSize(batch, length)
    plan = partial(plan_forward, shape, setup, size, accelerator=on_card, width=computed)
    if on_vulkan := place == "wgpu" and shape.is_decoder:
        plan = partial(plan_vulkan_forward, shape, setup, size)
    if on_vulkan or kind.quantization == "nf4":
        whole = plan(None)
        weights, working = whole.weights, whole.working + whole.passing
    streams = facts is not None and facts.streams_frozen
    least = weights + working
    if facts and facts.is_quantizing:
        largest = max(shape.table_parameters, shape.widest_linear)
        loaded = 0 if shape.stored in _STORED.values() else 4 * shape.parameters
        weights = int8_opening_bytes(shape.parameters, largest, loaded)
        least = weights + working
    elif streams:
        least = min(least, plan(0).total, plan(HEAD_STREAMED).total)
    elif kind.file:
        read = weights
        in_use = shape.layer_parameters + shape.table_parameters
        least = working + int(in_use * kind.bits / 8)
    rooms = [Room(int(device.memory), place).usable for device in devices]
    refused = facts and facts.explain_refusal(
        experts=shape.experts > 1, recurrent=shape.recurrent_layers > 0
    )
    if place == "wgpu" and not refused and not shape.is_decoder:
        refused = "refuses layers that transformers' code computes"
    able = [
        (one, usable)
        for one, usable in zip(candidates, rooms, strict=True)
        if least <= usable and not refused
    ]
    rates: list[float | None] = []
    streamed = ""
    for each, usable in able:
        fitting = weights + working <= usable
        again = 0 if fitting or streams else read
        rate = _tokens_per_second(shape, each.device, place, length, wide, again / batch, given)
        if streams and not fitting:
            chosen = choose_resident(
                plan, shape.layers, lambda some, usable=usable: some.total <= usable
            )
            if chosen.resident == 0:
                chosen = stream_head(chosen, plan, lambda some: some.total, usable)
            source = each.find_source(weights)
            rate, how = _read_layers(shape, setup, each, size, chosen.resident, source, rate)
            streamed = streamed or how
        rates.append(rate)
    known = sorted((rate for rate in rates if rate is not None), reverse=True)
    together = [(count * rate, count) for count, rate in enumerate(known, 1)]
    rate, teachers = max(together, default=(None, len(able)))
    fits = "no" if not able else "yes" if weights + working <= max(rooms) else "disk"
    if fits == "disk" and streams:
        fits = "streamed"
    return TeacherOption(
        format=kind,
        place=place,
        device=_pick_device([each.device for each, _ in able] or devices, rates).name,
        weights=weights,
        working=working,
        least=least,
        room=max(rooms),
        fits=fits,
        refused=refused or "",
        streamed=streamed if fits != "yes" else "",
        teachers=teachers,
        rate=rate,
        source="computed" if given is None else "given",
    )


def _read_layers(
    shape: ModelShape,
    training: TrainingSetup,
    one: TeacherDevice,
    size: ForwardSize,
    resident: int | None,
    source: LayerSource,
    computing: float | None,
) -> tuple[float | None, str]:
    """Return the tokens a second of a teacher that reads layers for each forward, in words.

    Args:
        computing: tokens a second if nothing is read.
    """
    if computing is None:
        return None, f"with {describe_residents(resident or 0, shape.layers)} from {source.text}"
    training = replace(
        training,
        length=size.length,
        rows=size.tokens // size.length,
        resident=resident,
        evaluates=True,
        one_queue=one.place == "wgpu",
    )
    flops = computing * forward_flops_per_token(shape, size.length).value
    reading = plan_reading(shape, training, flops, source, one.pool.feed if one.pool else PCIE)
    assert reading is not None
    rate = computing * reading.speed
    return rate, f"{rate:,.3g} tokens/s with {reading.text}"


def _pick_device(devices: Sequence[DeviceModel], rates: Sequence[float | None]) -> DeviceModel:
    """Return the fastest device, or without rates the roomiest."""
    known = {rate: device for device, rate in zip(devices, rates, strict=False) if rate}
    return known[max(known)] if known else max(devices, key=lambda one: one.memory)


def _tokens_per_second(
    shape: ModelShape,
    device: DeviceModel,
    place: Backend,
    length: int,
    wide: bool,
    again: float,
    given: float | None,
) -> float | None:
    """Return the tokens a second of one teacher; None: the device's speed is unknown.

    `again` are the bytes a token that are read from the disk.

    Processors are assumed to compute every format at their speed in fp32. A file that is larger
    than the memory is read whole for each forward: pages that are used in turn are dropped in turn.
    """
    precision = AUTOCAST if place == "cuda" and not wide else FP32
    peak = find_speed(device, TrainingSetup(precision=precision, on_host=place == "cpu"))
    if given is None and peak is None:
        return None
    if given is not None:
        seconds = 1 / given
    else:
        assert peak is not None
        seconds = forward_flops_per_token(shape, length).value / (peak * EFFICIENCY)
    return 1 / (seconds + again / DISK_RATE)


def _put_in(options: Sequence[TeacherOption], measured: Measured) -> list[TeacherOption]:
    """Return options with what was measured in place of what was computed of it."""
    wanted, rates = (measured.engine, measured.weights, measured.place), measured.rates.values()
    return [
        replace(one, rate=len(rates) * min(rates), teachers=len(rates), source="measured")
        if (one.format.engine, one.format.weights, one.place) == wanted
        else one
        for one in options
    ]
