"""Activations kept for backward, in bytes for each token of a micro-batch.

Two families of kernels are known. A gated decoder (Llama, Qwen) is counted as Motley computes it,
with fused attention; a GPT as Megatron-LM does, by Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import Recompute, Strategy, TrainingSetup
from trainer.planning.term import Term, term

KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, equations 1 to 6"
COUNTED = "Motley's decoder, counted in tests/trainer/planning/test_replica_memory.py"


def of_layer(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes that one layer keeps for a token."""
    if shape.gated:
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
    value = shape.hidden * (10 / whole + 24 / tensor) + 5 * scores / tensor
    return term(
        "a layer, each token",
        value,
        "hidden * (10 / whole + 24 / tensor) + 5 * scores / tensor",
        KORTHIKANTI,
        hidden=shape.hidden,
        whole=whole,
        tensor=tensor,
        scores=scores,
    )


def _of_decoder_layer(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    element = training.precision.activation
    keys = shape.queries if training.packed else shape.keys  # with a mask, groups are repeated
    inner = _inner(shape)
    # Attention: turned queries and its result, turned keys and values. MLP: gate, its SiLU, up and
    # their product.
    sharded = element * (2 * shape.queries + 2 * keys + 4 * inner)
    heads = (4 + (4 if shape.normalised_heads else 0)) * shape.heads
    if shape.normalised_heads:
        each = 4 if training.method != "full" else 8 if element == 4 else 6
        sharded += each * (shape.queries + shape.keys)
        heads += 4 * shape.kv_heads
    adapters = 0
    if training.method != "full":
        adapters = element * training.rank * len(training.targets)
    # Rows of several samples have a mask, of which each attention makes one of numbers.
    mask = training.length if training.packed else 0
    whole = strategy.tensor if strategy.sequence else 1
    norms, inputs = norm_bytes(training)
    value = (
        (norms / whole + inputs) * shape.hidden
        + (sharded + heads) / strategy.tensor
        + adapters
        + (element + 1) * mask
    )
    return term(
        "a layer, each token",
        value,
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


def norm_bytes(training: TrainingSetup) -> tuple[int, int]:
    """Return the bytes for each column of a token that both norms of a layer keep, and their users.

    RMSNorm works in fp32 and keeps its input, for a trained weight also the normalised one. Its
    result is the input of two or three linears, which sequence parallelism gathers first; where
    its format is not that of the products, autocast makes a copy for each.
    """
    own = 8 if training.method == "full" else 4
    if training.precision.activation == 4:
        return 2 * own, 2 * 4
    copies = 2 if stream_bytes(training) == 2 else 2 + 3
    return 2 * own, 2 * copies


def stream_bytes(training: TrainingSetup) -> int:
    """Return the bytes of an element of the residual stream: the embedding's format."""
    narrow = training.precision.activation == 2 and training.precision.frozen == 2
    return 2 if narrow and training.method != "full" else 4


def _inner(shape: ModelShape) -> int:
    return max(shape.inner * shape.active_experts + shape.shared_inner, shape.dense_inner)


def of_backward(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes for a token of gradients that exist while a layer's backward runs.

    The most are around the MLP: of the product, its two factors, and the residual stream.
    """
    element = training.precision.activation
    whole = strategy.tensor if strategy.sequence else 1
    inner = _inner(shape) if shape.gated else shape.inner
    return term(
        "gradients of one layer's activations, each token",
        3 * element * inner / strategy.tensor + 2 * 4 * shape.hidden / whole,
        "3 * element * inner / tensor + 2 * 4 * hidden / whole",
        COUNTED,
        element=element,
        inner=inner,
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
        element * shape.hidden / whole,
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
        norm * shape.hidden + mask,
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
    held = 1 if training.recompute == "full" else layers
    element = training.precision.activation
    return term(
        "frozen linears in the format of the products",
        element * linears * held / layers,
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
    that, ZB-V as many as 1F1B, DualPipeV half a micro-batch more.
    """
    stages, microbatches, chunks = strategy.stages, strategy.microbatches, strategy.chunks
    numbers = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    name = "micro-batches in flight"
    if strategy.schedule == "gpipe" or stages == 1:
        number = microbatches if stages > 1 else 1
        return term(name, number, "held", "Huang et al., arXiv 1811.06965", held=number)
    if strategy.schedule == "interleaved":
        value = min(microbatches, stages) * (1 + (stages - 1) / (stages * chunks))
        return term(
            name,
            value,
            "min(microbatches, stages) * (1 + (stages - 1) / (stages * chunks))",
            KORTHIKANTI + ", section 4.2.3",
            **numbers,
        )
    if strategy.schedule == "dualpipev":
        value = min(microbatches, stages + 0.5)
        source = "DeepSeek, github.com/deepseek-ai/DualPipe, its table: 2 p + 1 halves"
        return term(name, value, "min(microbatches, stages + 0.5)", source, **numbers)
    source = "Qi et al., arXiv 2401.10241" if strategy.schedule == "zbv" else KORTHIKANTI
    return term(name, min(microbatches, stages), "min(microbatches, stages)", source, **numbers)
