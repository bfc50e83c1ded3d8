"""The memory of a replica on the wgpu engine, exactly as the engine takes it (F-HET-002).

The engine keeps what it has taken and reuses the smallest piece that is large enough, so the order
of its temporary buffers decides their total. `_layer_forward` and the functions after it take
and give in the order of `trainer/replica/wgpu/layers`; a test compares every part with a recording.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, linear_path
from trainer.model.header_layout import PEFT_PREFIX
from trainer.model.layout import SIDE_A, GradientLayout
from trainer.planning.resident_layers import HEAD_STREAMED, resolve_resident, streamed_layers
from trainer.planning.stored_layers import split_head
from trainer.planning.vulkan_buffers import (
    BINDING_BYTES,
    CHUNK_ROWS,
    NF4_BLOCK,
    PARTIAL_SUMS,
    PLANNED_ENTRIES,
    SCORE_BYTES,
    Kind,
    align_size,
    count_slots,
    logit_rows,
    logit_window_bytes,
    padded_length,
    padded_words,
    row_windows,
    tensor_bytes,
    upload_regions,
)

USABLE = 0.95
"""Share of a device's free memory; the rest is for the driver and fragmentation."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SLOTS = 2
"""Layers whose memory all those have that are written at each use, and chunks of a head."""


def plan_vulkan_memory(
    model: Architecture,
    layout: GradientLayout,
    config: RunConfig,
    samples: int = 1,
    *,
    recompute: bool,
    evaluates: bool = False,
    reads_logits: bool = False,
    resident: int | None = None,
    waiting: int = 0,
) -> dict[str, int]:
    """Return bytes by purpose for micro-batches of `samples` of the longest samples.

    If layers are read at each use, micro-batches run layer by layer in groups. Of all of a group
    the inputs of layers wait, and of one that is not computed twice what backward needs; the memory
    of one layer is enough for the rest.

    Args:
        evaluates: nothing is trained: a forward is all, and what it computes is not kept. The
            config's method is not `full`, since such a model is frozen then.
        reads_logits: it is a teacher, of which all logits are read, one forward after the other.
        resident: layers whose frozen linears stay on the device; None: those of `model.resident`,
            which `auto` leaves at all.
        waiting: tokens of the other micro-batches of a group.
    """
    length = padded_length(config.data.max_seq_len)
    rows = samples * length
    targets = samples if config.task == "classify" else rows
    chunk = min(CHUNK_ROWS, targets)
    chunks = -(-targets // chunk)
    entries = PLANNED_ENTRIES if config.distillation and not evaluates else 0
    trainable = sum(
        align_size(sum(align_size(4 * slot.size) for slot in block.tensors))
        for block in layout.blocks
    )
    layers = model.num_layers
    words = sum(map(padded_words, upload_regions(rows, chunks * chunk, entries).values()))
    adapters = config.lora.linears if any(block.is_layer for block in layout.blocks) else ()
    scored = logit_rows(chunk, model.vocab_size, BINDING_BYTES) if reads_logits else chunk
    work = _StepBuffers(model, config, samples, length, scored, adapters)
    states = 0 if reads_logits else 2 if entries else 1
    hidden = align_size(4 * rows * model.hidden_size)
    layer = sum(map(align_size, work.activation_sizes(rows, evaluates=evaluates)))
    streams = resolve_resident(config.model.resident, layers, resident) is not None
    inputs = align_size(4 * words)
    if _reads_embedding(model, config, resident):
        inputs += align_size(tensor_bytes((rows, model.hidden_size), matrix_kind(config)))
    if evaluates and config.task == "classify":
        inputs += align_size(4 * samples)  # its predictions
    waits: dict[str, int] = {} if evaluates else {"checkpoints": (layers + 1) * hidden}
    if streams and not reads_logits:
        together = rows + waiting
        cells = [4 * together * model.hidden_size] * (1 if evaluates else layers + 1)
        if not (recompute or evaluates):
            cells += layers * work.activation_sizes(together)
        waits = {"waiting": sum(map(align_size, cells))}
    columns = model.vocab_size if reads_logits else _logit_columns(model, config, chunk)
    once = recompute or streams or evaluates
    return {
        "frozen": _frozen_bytes(model, config, resident),
        "trainable": trainable,
        "gradients": 0 if evaluates else trainable,
        "input": inputs,
        **waits,
        "activations": (1 if once else layers) * layer
        + (2 if evaluates else 3 if streams else 1) * hidden,
        "workspace": work.total_bytes(chunks, states, recompute, evaluates=evaluates),
        "logits": align_size(4 * scored * columns),
    }


def frozen_tensors(
    model: Architecture, config: RunConfig, resident: int | None = None
) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Yield name, shape and kind of everything that does not train and is not read by rows.

    Linears are NF4 if the config says so; matrices have its dtype; vectors and adapters are fp32.

    Args:
        resident: layers whose linears stay; None: those of `model.resident`. `HEAD_STREAMED`: none,
            and the head is in chunks of its rows.
    """
    if config.method == "full":
        return
    tensors = [
        (f"model.layers.{layer}.{name}", shape)
        for layer in range(model.num_layers)
        for name, shape in model.layer_tensors()
    ]
    table = (model.vocab_size, model.hidden_size)
    tensors.append(("model.norm.weight", (model.hidden_size,)))
    if not _reads_embedding(model, config, resident):
        tensors.append((EMBEDDING, table))
    if _streams_head(config, resident):
        chunks = enumerate(split_head(*table))
        tensors += [
            (name_chunk(number), (rows.stop - rows.start, table[1])) for number, rows in chunks
        ]
    elif config.task == "causal-lm" and not model.tied:
        tensors.append((HEAD, table))
    linears = tuple(f"{linear}.weight" for linear in LINEARS)
    matrix = matrix_kind(config)
    for name, shape in tensors:
        quantised = config.model.quantization == "nf4" and name.endswith(linears)
        yield name, shape, "nf4" if quantised else matrix if len(shape) == 2 else "f32"
    if config.freezes_a:
        for layer in config.lora.select_layers(model.num_layers):
            for linear in config.lora.linears:
                stem = f"{PEFT_PREFIX}model.layers.{layer}.{linear_path(linear)}"
                shape = config.lora.lora_rank, model.linear_shape(linear)[1]
                yield f"{stem}{SIDE_A}", shape, "f32"


def name_chunk(number: int) -> str:
    """Return the name of a chunk of a head's rows."""
    return f"{HEAD}.{number}"


def shared_matrices(model: Architecture, config: RunConfig, resident: int | None) -> dict[str, str]:
    """Return the frozen matrices that are written at each use, each with whose memory it has.

    Two layers have memory, and the others share it by turns: one is used, one is written. So do the
    chunks of a head, after the layers and in their order.

    Args:
        resident: as for `frozen_tensors`.
    """
    chunks = 0
    if _streams_head(config, resident):
        chunks = len(split_head(model.vocab_size, model.hidden_size))
    resident = resolve_resident(config.model.resident, model.num_layers, resident)
    streamed = sorted(streamed_layers(model.num_layers, resident))
    linears = {
        f"model.layers.{layer}.{linear_path(linear)}.weight": (
            f"model.layers.{streamed[place % SLOTS]}.{linear_path(linear)}.weight"
        )
        for place, layer in enumerate(streamed)
        for linear in LINEARS
    }
    return linears | {name_chunk(each): name_chunk(each % SLOTS) for each in range(chunks)}


def _streams_head(config: RunConfig, resident: int | None) -> bool:
    """Return whether a language model's head is written in chunks of its rows at each use."""
    return resident == HEAD_STREAMED and config.task == "causal-lm"


def _reads_embedding(model: Architecture, config: RunConfig, resident: int | None) -> bool:
    """Return whether of the embedding the rows of a micro-batch alone are on the device."""
    has_head = model.tied and config.task == "causal-lm"
    streams = resolve_resident(config.model.resident, model.num_layers, resident) is not None
    return streams and (not has_head or _streams_head(config, resident))


def matrix_kind(config: RunConfig) -> Kind:
    """Return how matrices are stored that are not quantised."""
    return "bf16" if config.model.dtype == "bfloat16" else "f32"


def _frozen_bytes(model: Architecture, config: RunConfig, resident: int | None) -> int:
    slots = count_slots(config.data.max_seq_len, 0)
    total = 2 * align_size(4 * slots * (model.head_dim // 2))  # tables of the rotary embedding
    shared = shared_matrices(model, config, resident)
    for name, shape, kind in frozen_tensors(model, config, resident):
        if shared.get(name, name) != name:
            continue
        total += align_size(tensor_bytes(shape, kind))
        if kind == "nf4":
            total += align_size(4 * -(-math.prod(shape) // NF4_BLOCK))
    return total


def _logit_columns(model: Architecture, config: RunConfig, chunk: int) -> int:
    rows, kind = model.vocab_size, "f32"
    if config.num_classes is not None:
        rows = config.num_classes
    elif config.method == "lora" and config.model.dtype == "bfloat16":
        kind = "bf16"
    rows = split_head(rows, model.hidden_size)[0].stop
    limit = logit_window_bytes(rows, model.hidden_size, kind, chunk, BINDING_BYTES)
    return next(row_windows(rows, model.hidden_size, kind, limit))[1]


@dataclass
class _BufferPool:
    """Memory that is reused: the smallest free piece that is large enough."""

    free: list[int] = field(default_factory=list[int])
    total: int = 0

    def take_buffer(self, elements: int) -> int:
        """Return the piece for an fp32 buffer."""
        size = 4 * elements
        fitting = [piece for piece in self.free if piece >= size]
        if not fitting:
            self.total += align_size(size)
            return align_size(size)
        found = min(fitting)
        self.free.remove(found)
        return found

    def give_back(self, *pieces: int) -> None:
        self.free += pieces

    def touch_together(self, *elements: int) -> None:
        """Take buffers together, and give them back."""
        self.give_back(*[self.take_buffer(count) for count in elements])


@dataclass
class _StepBuffers:
    """The temporary buffers of one micro-batch."""

    model: Architecture
    config: RunConfig
    samples: int
    length: int
    chunk: int
    adapters: Collection[str]
    """Linears that have adapters."""
    pieces: _BufferPool = field(default_factory=_BufferPool)

    def __post_init__(self) -> None:
        model = self.model
        self.rows = self.samples * self.length
        self.hidden = self.rows * model.hidden_size
        self.queries = self.rows * model.num_heads * model.head_dim
        self.keys = self.rows * model.num_kv_heads * model.head_dim
        self.inner = self.rows * model.intermediate_size
        self.full = self.config.method == "full"
        self.low = self.rows * self.config.lora.lora_rank
        self.adapted = () if self.full else self.adapters
        group = model.num_heads // model.num_kv_heads * self.length
        limit = min(BINDING_BYTES, SCORE_BYTES)
        every = self.samples * model.num_kv_heads
        heads = min(limit // (4 * self.length * group), every)
        rows = group if heads else limit // (4 * self.length)
        self.scores = max(1, heads) * rows * self.length

    def activation_sizes(self, rows: int, *, evaluates: bool = False) -> list[int]:
        """Return the bytes of all arrays that a layer's forward leaves for backward.

        Args:
            evaluates: no backward follows; of two pairs of arrays there is one at a time.
        """
        model = self.model
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        widths = [model.hidden_size, queries] * (2 if evaluates else 3) + [keys] * 3
        return [4 * rows * width for width in (*widths, *[model.intermediate_size] * 2)]

    def total_bytes(
        self, chunks: int, states: int, recompute: bool, *, evaluates: bool = False
    ) -> int:
        """Return the bytes of all temporary buffers: after two like layers no more are taken.

        Args:
            states: of the losses of a chunk of targets.
        """
        linears, lora = self.adapted, self.config.lora
        layers = [linears] * 2
        if lora.layers_to_transform is not None and linears:
            chosen = lora.select_layers(self.model.num_layers)
            layers = [linears if n in chosen else () for n in range(self.model.num_layers)]
        for self.adapted in layers:
            self._recompute_layer()
            self._finish_layer()
        for _ in range(min(chunks, 2)):
            self._add_head(states, evaluates=evaluates)
        for self.adapted in [] if evaluates else reversed(layers):
            if recompute:
                self._recompute_layer()
            self._layer_backward()
        return self.pieces.total

    def _add_linear(self, name: str) -> None:
        if name in self.adapted:
            self.pieces.touch_together(self.low)

    def _linear_backward(self, name: str) -> None:
        if self.full and name in self.model.biased:
            columns = self.model.linear_shape(name)[0]
            self.pieces.touch_together(self._add_partial(self.rows, columns))
        if name in self.adapted:
            self.pieces.touch_together(self.low, self.low)

    def _add_partial(self, rows: int, columns: int) -> int:
        return min(rows, PARTIAL_SUMS) * columns

    def _norm_backward(self, rows: int) -> None:
        if self.full:
            self.pieces.touch_together(self._add_partial(rows, self.model.hidden_size))

    def _recompute_layer(self) -> None:
        self._add_linear("q_proj")
        self._add_linear("k_proj")
        values = self.pieces.take_buffer(self.keys)
        self._add_linear("v_proj")
        self.pieces.give_back(values)
        merged = self.pieces.take_buffer(self.queries)
        self.pieces.touch_together(self.scores)
        self.pieces.give_back(merged)
        for name in ("o_proj", "gate_proj", "up_proj"):
            self._add_linear(name)

    def _finish_layer(self) -> None:
        product = self.pieces.take_buffer(self.inner)
        self._add_linear("down_proj")
        self.pieces.give_back(product)

    def _add_head(self, states: int, *, evaluates: bool) -> None:
        take, give = self.pieces.take_buffer, self.pieces.give_back
        width = self.chunk * self.model.hidden_size
        first = [take(size) for size in (width, width, *[4 * self.chunk] * states)]
        if not evaluates:
            gradients = [take(width), take(width)]
            self._norm_backward(self.chunk)
            give(*gradients)
        give(*first)

    def _layer_backward(self) -> None:
        take, give = self.pieces.take_buffer, self.pieces.give_back
        product, dproduct = take(self.inner), take(self.inner)
        self._linear_backward("down_proj")
        give(product, dproduct)
        dnormed = take(self.hidden)
        self._linear_backward("gate_proj")
        self._linear_backward("up_proj")
        self._norm_backward(self.rows)
        give(dnormed)

        dattended = take(self.queries)
        self._linear_backward("o_proj")
        dmerged = take(self.queries)
        dheads = [take(size) for size in (self.queries, self.keys, self.keys)]
        self.pieces.touch_together(self.scores, self.scores)
        give(dmerged)
        dnormed = take(self.hidden)
        self._head_norm(self.queries)
        self._linear_backward("q_proj")
        draw = take(self.keys)
        self._head_norm(self.keys)
        self._linear_backward("k_proj")
        self._linear_backward("v_proj")
        self._norm_backward(self.rows)
        give(dattended, *dheads, dnormed, draw)

    def _head_norm(self, elements: int) -> None:
        if self.full and self.model.normalised_heads:
            turned = self.pieces.take_buffer(elements)
            head = self.model.head_dim
            self.pieces.touch_together(self._add_partial(elements // head, head))
            self.pieces.give_back(turned)
