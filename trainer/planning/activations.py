"""Activations kept for backward, in bytes for each token of a micro-batch.

Two families of kernels are known. A gated decoder (Llama, Qwen) is counted as Motley computes it,
with fused attention; a GPT as Megatron-LM does, by Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.model.family import SavedActivations
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import Recompute, Strategy, TrainingSetup
from trainer.planning.term import Term, term

KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, equations 1 to 6"
RECURRENT, RECURRENT_NARROW = 37, 5.75
"""Bytes for a column of a recurrent layer's keys and values: in fp32, and tensors of the products'
format (measured)."""
COUNTED = "Motley's decoder, counted in tests/trainer/planning/test_replica_memory.py"


def of_layer(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes that one layer keeps for a token."""
    if shape.gated or shape.kept is not None:
        return _of_decoder_layer(shape, training, strategy)
    return of_gpt_layer(
        shape, training.length, strategy.tensor, strategy.sequence, training.recompute
    )


def of_gpt_layer(
    shape: ModelShape, length: int, tensor: int, sequence: bool, recompute: Recompute
) -> Term:
    """Return the bytes a token of a GPT's layer: `h (34 + 5 a s / h)` on one device.

    Of the 34, tensor parallelism divides 24, and sequence parallelism the other 10. Selective
    recomputation drops the scores, `5 a s`; fused attention never has them.
    """
    whole = tensor if sequence else 1
    scores = shape.heads * length if recompute == "none" else 0
    return term(
        "a layer, each token",
        "hidden * (10 / whole + 24 / tensor) + 5 * scores / tensor",
        KORTHIKANTI,
        hidden=shape.hidden,
        whole=whole,
        tensor=tensor,
        scores=scores,
    )


def _of_decoder_layer(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    element = training.precision.activation
    kept = shape.kept or SavedActivations()
    # With a mask, groups are repeated.
    keys = shape.queries if training.packed or kept.repeated else shape.keys
    # Attention: turned queries and its result, turned keys and values. MLP: gate, its SiLU, up and
    # their product.
    sharded = element * (kept.queries * shape.queries + 2 * keys)
    sharded += _mlp_bytes(shape, training, kept)
    if kept.scores:  # softmax works in fp32; its result is copied to another format
        copies = kept.scores - 1 + (element < 4)
        sharded += (4 + element * copies) * shape.heads * training.length
    heads = (4 + (4 if shape.normalised_heads else 0)) * shape.heads
    if shape.normalised_heads:
        each = 4 if training.method != "full" else 8 if element == 4 else 6
        sharded += each * (shape.queries + shape.keys)
        heads += 4 * shape.kv_heads
    adapters = 0
    if training.method != "full":
        adapters = element * training.rank * len(training.targets)
    if training.dora:  # the products before their rows are scaled, in fp32
        rows = {name: size[0] for name, size in shape.layer_matrices().items()}
        adapters += 4 * sum(rows[name] for name in training.targets if name in rows)
    if shape.recurrent_layers:
        share = shape.recurrent_layers / shape.layers
        attention = element * (kept.queries * shape.queries + 2 * keys)
        recurrent = (RECURRENT + RECURRENT_NARROW * element) * shape.recurrent_columns
        sharded += share * (recurrent - attention)
    # Rows of several samples have a mask, of which each attention makes one of numbers.
    mask = training.length if training.packed else 0
    whole = strategy.tensor if strategy.sequence else 1
    norms, inputs = norm_bytes(shape, training)
    return term(
        "a layer, each token",
        "(norms / whole + inputs) * hidden + (sharded + heads) / tensor + adapters"
        " + (element + 1) * mask",
        COUNTED,
        norms=norms,
        inputs=inputs,
        hidden=shape.hidden,
        whole=whole,
        sharded=sharded,
        heads=heads,
        tensor=strategy.tensor,
        adapters=adapters,
        element=element,
        mask=mask,
    )


def _mlp_bytes(shape: ModelShape, training: TrainingSetup, kept: SavedActivations) -> float:
    """Return the bytes that an MLP keeps for a token, or the experts that it passes through.

    Experts compute in the format of their weights, in NF4 in that of products.
    """
    if shape.experts == 1 or shape.kept is None:
        return training.precision.activation * kept.inner * _inner_width(shape)
    trained = training.method == "full" or adapts_experts(shape, training)
    columns = (kept.inner - (not trained)) * shape.inner + (1 + trained) * shape.hidden
    # The expert that every token passes through, and its product before a gate of its own.
    shared = kept.inner * shape.shared_inner + shape.hidden if shape.shared_inner else 0
    routed = _expert_element(training) * columns * shape.active_experts
    return routed + training.precision.activation * shared


def adapts_experts(shape: ModelShape, training: TrainingSetup) -> bool:
    """Return whether experts have adapters."""
    wanted = shape.adapts_experts if training.experts is None else training.experts
    return training.method != "full" and shape.experts > 1 and wanted


def expert_adapters(shape: ModelShape, training: TrainingSetup) -> float:
    """Return the elements of the adapters of one layer's experts and router that train."""
    if not adapts_experts(shape, training):
        return 0.0
    a, b = shape.expert_adapters(training.rank)
    return b if training.frozen_a else a + b


def of_adapted_experts(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy
) -> Iterator[Term]:
    """Yield the bytes of experts with their adapters, W + scale B A, which backward needs.

    Recomputation has those of one layer at a time; a gradient of one layer's comes on top. There
    are none of experts in NF4, nor of a layer that is read at each use.
    """
    layers = math.ceil((training.adapted_layers or shape.layers) / strategy.stages)
    layers = layers if training.resident is None else min(layers, max(0, training.resident))
    if not (adapts_experts(shape, training) and layers) or training.method == "qlora":
        return
    held = 1 if training.recompute == "full" else layers
    yield term(
        "experts with their adapters, and a gradient of one layer's",
        "element * experts * (held + gradients)",
        COUNTED,
        element=_expert_element(training),
        experts=shape.layer_experts,
        held=1 if training.evaluates else held,
        gradients=int(not training.evaluates),
    )


def _expert_element(training: TrainingSetup) -> int:
    if training.method == "qlora":
        return training.precision.activation
    return 4 if training.method == "full" else training.precision.frozen


def norm_bytes(shape: ModelShape, training: TrainingSetup) -> tuple[int, int]:
    """Return the bytes for each column of a token that the norms of a layer keep, and their users.

    LayerNorm, of a GPT, keeps its input as it is. RMSNorm works in fp32 and keeps its input, for a
    trained weight also the normalised one. Its result is the input of two or three linears, which
    sequence parallelism gathers first; where its format is not that of the products, autocast makes
    a copy for each.
    """
    if not shape.gated:
        return 2 * stream_bytes(training), 2 * training.precision.activation
    count = 2 if shape.kept is None else shape.kept.norms
    own = 8 if training.method == "full" else 4
    if training.precision.activation == 4:
        return count * own, 2 * 4
    copies = 2 if stream_bytes(training) == 2 else 2 + 3
    return count * own, 2 * copies


def stream_bytes(training: TrainingSetup) -> int:
    """Return the bytes of an element of the residual stream: the embedding's format."""
    narrow = training.precision.activation == 2 and training.precision.frozen == 2
    return 2 if narrow and training.method != "full" else 4


def _inner_width(shape: ModelShape) -> int:
    return max(shape.inner * shape.active_experts + shape.shared_inner, shape.dense_inner)


def of_backward(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes for a token of gradients that exist while a layer's backward runs.

    The most are around the MLP: of the product, its two factors, and the residual stream; or those
    of the scores, if attention is not fused.
    """
    experts = shape.experts > 1 and shape.kept is not None
    element = _expert_element(training) if experts else training.precision.activation
    whole = strategy.tensor if strategy.sequence else 1
    inner = _inner_width(shape) if shape.gated else shape.inner
    scores = shape.heads * training.length if shape.kept and shape.kept.scores else 0
    return term(
        "gradients of one layer's activations, each token",
        "max(3 * element * inner, 12 * scores) / tensor + 2 * 4 * hidden / whole",
        COUNTED,
        element=element,
        inner=inner,
        scores=scores,
        tensor=strategy.tensor,
        hidden=shape.hidden,
        whole=whole,
    )


def of_layer_input(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes of a layer's input for a token: all that full recomputation keeps."""
    element = stream_bytes(training) if shape.gated else 2
    whole = strategy.tensor if strategy.sequence else 1
    return term(
        "a layer's input, each token",
        "element * hidden / whole",
        KORTHIKANTI,
        element=element,
        hidden=shape.hidden,
        whole=whole,
    )


def of_head(shape: ModelShape, training: TrainingSetup) -> Term:
    """Return the bytes around the final norm for a token, without the logits."""
    norm = 4 if not shape.gated else 8 if training.method == "full" else 4
    mask = training.length if training.packed else 0
    return term(
        "the final norm, each token",
        "norm * hidden + mask",
        COUNTED if shape.gated else KORTHIKANTI,
        norm=norm,
        hidden=shape.hidden,
        mask=mask,
    )


def of_frozen_linears(training: TrainingSetup, linears: float, layers: int) -> Term:
    """Return the bytes of frozen weights in the format of the products, kept for backward.

    Recomputation has those of one layer at a time.
    """
    held = 1 if training.recompute == "full" or training.evaluates else layers
    element = training.precision.activation
    return term(
        "frozen linears in the format of the products",
        "element * linears * held / layers",
        COUNTED,
        element=element,
        linears=linears,
        held=held,
        layers=layers,
    )


def in_flight(strategy: Strategy) -> Term:
    """Return the micro-batches whose activations the first stage holds, by schedule.

    GPipe holds all, 1F1B as many as stages, an interleaved schedule `1 + (p - 1) / (p v)` times
    that, ZB-V as many as 1F1B.
    """
    stages, microbatches, chunks = strategy.stages, strategy.microbatches, strategy.chunks
    numbers = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    name = "micro-batches in flight"
    if strategy.schedule == "gpipe" or stages == 1:
        number = microbatches if stages > 1 else 1
        return term(name, "held", "Huang et al., arXiv 1811.06965", held=number)
    if strategy.schedule == "interleaved":
        formula = "min(microbatches, stages) * (1 + (stages - 1) / (stages * chunks))"
        return term(name, formula, KORTHIKANTI + ", section 4.2.3", **numbers)
    source = "Qi et al., arXiv 2401.10241" if strategy.schedule == "zbv" else KORTHIKANTI
    return term(name, "min(microbatches, stages)", source, **numbers)
