"""The memory of one device by part, for every strategy: bytes, with their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from trainer.planning import activations
from trainer.planning.logit_chunks import LOGIT_ELEMENTS, further_chunks
from trainer.planning.resident_layers import streamed_layers
from trainer.planning.shapes import ModelShape
from trainer.planning.stored_layers import (
    NF4_BYTES,
    QLORA,
    DeviceElements,
    frozen_bytes,
    passing_layers,
    reads_head,
)
from trainer.planning.strategy import ElementSizes, Strategy, TrainingSetup
from trainer.planning.term import Term, term

ZERO = "Rajbhandari et al., arXiv 1910.02054, section 3.1 and figure 1"
FSDP = "Zhao et al., arXiv 2304.11277: gathered units, one ahead"
OWN = "Motley: trainer/planning/memory.py"


@dataclass(frozen=True)
class MemoryParts:
    """Terms in bytes on the device that needs most."""

    weights: tuple[Term, ...]
    gradients: tuple[Term, ...]
    optimizer: tuple[Term, ...]
    activations: tuple[Term, ...]
    logits: tuple[Term, ...]
    buffers: tuple[Term, ...]

    def bytes_by_part(self) -> dict[str, int]:
        """Return the bytes of each part by its name."""
        return {part.name: _sum_terms(getattr(self, part.name)) for part in fields(self)}

    @property
    def total(self) -> int:
        """Bytes together."""
        return sum(self.bytes_by_part().values())

    def list_terms(self) -> list[tuple[str, Term]]:
        """Return every term with the name of its part."""
        return [(part.name, found) for part in fields(self) for found in getattr(self, part.name)]


def plan_memory_by_part(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy
) -> MemoryParts:
    """Return the memory of the device that needs most, in bytes.

    In a pipeline that is the first stage, which holds the most micro-batches, or the last, which
    holds the logits.
    """
    stages = {0, strategy.stages - 1}
    planned = [_of_stage(shape, training, strategy, stage) for stage in sorted(stages)]
    return max(planned, key=lambda parts: parts.total)


def stage_holdings(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy, stage: int
) -> DeviceElements:
    """Return what tensor and pipeline parallelism leave to a device of a stage."""
    stages, tensor = strategy.stages, strategy.tensor
    share = math.ceil(shape.layers / stages) / shape.layers
    experts = shape.expert_parameters
    linears = shape.linear_parameters() - experts
    if stages == 1:
        rest = shape.parameters - linears - shape.small_parameters
        if training.classes is not None and not shape.tied and shape.counted is None:
            rest -= shape.table_parameters  # a classifier needs no output matrix
        rest = rest / tensor + shape.small_parameters
    else:
        rest = (shape.table_parameters + experts * share) / tensor
        rest += shape.small_parameters * share
        rest += shape.positions * shape.hidden if stage == 0 else 0
    new = (training.classes or 0) * shape.hidden if stage == stages - 1 else 0
    whole = len(training.whole)
    tables = whole * shape.table_parameters
    # What trains takes the place of the base's; of a tied table both must.
    rest -= max(0, whole - 1) * shape.table_parameters if shape.tied else tables
    if training.adapters is not None:
        new = training.adapters
    elif training.method != "full":
        new += adapter_parameters(shape, training, tensor) * share + tables
    still = 0.0
    if training.frozen_a and training.method != "full":
        both = adapter_parameters(shape, replace(training, frozen_a=False), tensor)
        still = (both - adapter_parameters(shape, training, tensor)) * share
    stay = 1.0
    if training.resident is not None:
        stay = max(0, training.resident) / shape.layers
        read = (1 - stay) * shape.linear_parameters()
        if shape.matrices:  # of unlike layers, and of others than the sizes tell
            numbers = streamed_layers(shape.layers, training.resident)
            read = sum(shape.matrices[number] for number in numbers)
        rest -= read - (1 - stay) * linears
        linears *= stay
        has_head = shape.tied and training.classes is None
        if not has_head and "embed_tokens" not in training.whole:
            rest -= shape.table_parameters  # its rows are read, too
        if reads_head(training):
            rest -= shape.table_parameters
    packed = 0.0
    if training.method == "qlora":
        packed = experts * stay * share / tensor
        rest -= packed
    return DeviceElements(linears * share / tensor, rest, new, still, tables, packed)


def adapter_parameters(shape: ModelShape, training: TrainingSetup, tensor: int = 1) -> float:
    """Return the elements of all adapters that train: `r (in + out)` for each linear, or `r out`.

    Under tensor parallelism the side of the sharded axis is divided: B of a column-parallel
    linear, A of a row-parallel one.
    """
    total = activations.expert_adapters(shape, training)
    for name, (rows, columns) in shape.layer_matrices().items():
        if name in training.targets:
            row_parallel = name in ("o_proj", "down_proj")
            b, a = (rows, columns / tensor) if row_parallel else (rows / tensor, columns)
            total += training.rank * (b if training.frozen_a else a + b)
    return (training.adapted_layers or shape.layers) * total


def trained_parameters(shape: ModelShape, training: TrainingSetup) -> float:
    """Return the elements that train on the whole model: all of it, or what is beside it."""
    full = training.method == "full"
    if full:
        return shape.parameters
    return adapter_parameters(shape, training) + len(training.whole) * shape.table_parameters


def _of_stage(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy, stage: int
) -> MemoryParts:
    kept = stage_holdings(shape, training, strategy, stage)
    precision = training.precision
    trained = kept.new + (kept.base if training.method == "full" else 0)
    shards = {"zero1": (1, 1), "zero2": (1, strategy.replicas)}
    weights, gradients = shards.get(strategy.data, (1, 1))
    if strategy.data == "fsdp":
        weights = gradients = strategy.replicas
    states = strategy.replicas if strategy.data in ("zero1", "zero2", "fsdp") else 1
    is_last = stage == strategy.stages - 1
    worked = tuple(_activation_terms(shape, training, strategy, stage))
    kept_gradients = _gradient_terms(kept, training, strategy, trained, gradients, worked[0].value)
    logits = (logit_bytes(shape, training, strategy),) if is_last else ()
    # Gradients stay from a step to the next one: what they share with activations is not free.
    freed = sum(part.value for part in (*worked, *logits, *kept_gradients[1:]))
    return MemoryParts(
        weights=(
            *(() if training.method == "full" else frozen_bytes(kept, training, weights)),
            _sharded_bytes("trained weights", trained, precision.weight, weights),
        ),
        gradients=kept_gradients,
        optimizer=optimizer_state(trained, training, strategy, states),
        activations=worked,
        logits=logits,
        buffers=(
            *_buffer_terms(shape, training, strategy, kept, trained),
            *_checkpoint_terms(training, strategy, trained, freed),
        ),
    )


def _sharded_bytes(name: str, elements: float, size: float, shards: int) -> Term:
    return term(name, "elements * size / shards", ZERO, elements=elements, size=size, shards=shards)


def _gradient_terms(
    kept: DeviceElements,
    training: TrainingSetup,
    strategy: Strategy,
    trained: float,
    shards: int,
    freed: float,
) -> tuple[Term, ...]:
    """Return the gradients, less what they share with activations.

    In a step of one micro-batch a layer's gradient comes to be as its activations are freed: the
    most of both is never there together. DDP's buckets stay from step to step.

    Args:
        freed: activations that the layers' backward frees one after the other.
    """
    size = training.precision.gradient
    every = _sharded_bytes("gradients", trained, size, shards)
    stay = strategy.data != "fsdp" and (strategy.data != "ddp" or strategy.replicas > 1)
    if stay or strategy.microbatches > 1 or strategy.stages > 1:
        return (every,)
    layers = kept.linears if training.method == "full" else kept.new - kept.tables
    layers *= size / shards
    return every, term(
        "of these, in place of activations", "-min(layers, freed)", OWN, layers=layers, freed=freed
    )


def optimizer_state(
    trained: float, training: TrainingSetup, strategy: Strategy, shards: int
) -> tuple[Term, ...]:
    """Return the optimizer's part: none where the coordinator has it and the device is a card.

    A CPU worker of Motley's exchange has fp32 moments and an averaged gradient in the same memory,
    and computes with the state's weights. In a run of one process that state is the coordinator's
    too, and gradients become averages where they are.
    DiLoCo adds an anchor of the weights and a momentum, fp32.
    """
    if strategy.data == "motley" or training.coordinates:
        if not training.on_host:
            return ()
        size = (8 if training.coordinates else 12) + training.beside_state
        return (_sharded_bytes("the exchange's vectors", trained, size, 1),)
    size = training.precision.optimizer
    state = _sharded_bytes("moments and master weights", trained, size, shards)
    if strategy.data != "diloco":
        return (state,)
    outer = term(
        "anchor and outer momentum",
        "8 * elements",
        "Douillard et al., arXiv 2311.08105, algorithm 1",
        elements=trained,
    )
    return state, outer


def state_bytes(
    parameters: float, stage: int, replicas: int, precision: ElementSizes | None = None
) -> float:
    """Return weights, gradients and optimizer state of a full training, in bytes.

    Args:
        stage: of ZeRO; 0 is DDP.
    """
    size = precision or ElementSizes(weight=2, gradient=2, optimizer=12, activation=2)
    weights = size.weight / (replicas if stage >= 3 else 1)
    gradients = size.gradient / (replicas if stage >= 2 else 1)
    return parameters * (weights + gradients + size.optimizer / (replicas if stage else 1))


def _activation_terms(
    shape: ModelShape, training: TrainingSetup, strategy: Strategy, stage: int
) -> Iterator[Term]:
    layer = activations.of_layer(shape, training, strategy)
    layers = math.ceil(shape.layers / strategy.stages)
    # The last stage begins backward at once, so it holds one micro-batch, or all of GPipe's.
    flight = activations.in_flight(strategy)
    held_at_once = flight.value
    if stage and strategy.schedule in ("1f1b", "interleaved"):
        held_at_once = 1.0
    tokens, name = training.tokens, "layers"
    if training.recompute == "full" or training.evaluates:
        row = activations.of_layer_input(shape, training, strategy)
        yield term(
            "inputs of layers",
            "in_flight * layers * tokens * input_bytes",
            row.source,
            in_flight=held_at_once,
            layers=2 if training.evaluates else layers,  # its output is the next one's
            tokens=tokens,
            input_bytes=row.value,
        )
        held_at_once, layers = 1, 1
        name = "one layer" if training.evaluates else "one layer, computed again"
    yield term(
        name,
        "in_flight * layers * tokens * (" + layer.formula + ")",
        layer.source,
        in_flight=held_at_once,
        layers=layers,
        tokens=tokens,
        **layer.numbers,
    )
    if training.waiting and not waits_on_host(training):
        yield waiting_activations(shape, training, strategy)
    if not training.evaluates or (shape.kept is not None and shape.kept.scores):
        backward = activations.of_backward(shape, training, strategy)
        yield term(
            "further scores" if training.evaluates else "gradients of activations",
            f"tokens * ({backward.formula})",
            backward.source,
            tokens=tokens,
            **backward.numbers,
        )
    if stage == strategy.stages - 1:
        head = activations.of_head(shape, training)
        yield term(
            "the final norm",
            f"tokens * ({head.formula})",
            head.source,
            tokens=tokens,
            **head.numbers,
        )


def waits_on_host(training: TrainingSetup) -> bool:
    """Return whether what waits of a group is in the memory of an accelerator's host."""
    return not training.on_host and not training.one_queue and training.recompute == "full"


def waiting_activations(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes of a group's micro-batches that wait while another one is computed.

    Those are the inputs of layers, or all that they keep if they are not computed again, and what
    the last layer returns, whose place its gradient takes. Layers of transformers are called with
    a rotation and at most two masks, which Motley's compute again.
    """
    layer = activations.of_layer(shape, training, strategy)
    row = activations.of_layer_input(shape, training, strategy).value
    again = training.recompute == "full"
    kept = 0 if training.evaluates else shape.layers * (row if again else layer.value)
    mask = 4 if shape.kept is not None and shape.kept.scores else 1
    called = 0 if shape.is_decoder else 8 * (shape.head_dim + 1) + 2 * mask * training.length
    return term(
        "activations of micro-batches that wait",
        "tokens * (kept + input_bytes + called)",
        OWN,
        tokens=training.waiting,
        kept=kept,
        input_bytes=row,
        called=called,
    )


def logit_bytes(shape: ModelShape, training: TrainingSetup, strategy: Strategy) -> Term:
    """Return the bytes of logits: a GPT's are all held, `4 s b V`; Motley takes them in chunks.

    Softmax and gradient take the place of a chunk's logits, but for a teacher's. A fully trained
    output matrix has a gradient that is added to the others.
    """
    if training.classes is not None:
        return term("logits of classes", "0", OWN)
    if not shape.gated and shape.kept is None:
        return term(
            "logits",
            "4 * tokens * vocab / tensor",
            activations.KORTHIKANTI,
            tokens=training.tokens,
            vocab=shape.vocab,
            tensor=strategy.tensor,
        )
    each = 4 if training.precision.activation == 4 else 6  # fp32, and a copy for the product
    each = 12 if training.taught else each
    trains = training.method == "full" or "lm_head" in training.whole
    trains = trains and not training.evaluates
    matrix = shape.table_parameters if trains else 0
    return term(
        "a chunk of logits",
        "(each * min(most, tokens * vocab) + 4 * matrix) / tensor",
        OWN,
        each=each,
        most=LOGIT_ELEMENTS,
        tokens=training.tokens,
        vocab=shape.vocab,
        matrix=matrix,
        tensor=strategy.tensor,
    )


def _buffer_terms(
    shape: ModelShape,
    training: TrainingSetup,
    strategy: Strategy,
    kept: DeviceElements,
    trained: float,
) -> Iterator[Term]:
    precision = training.precision
    if training.method == "lora" and precision.activation < precision.frozen:
        layers = math.ceil(shape.layers / strategy.stages)
        yield activations.of_frozen_linears(training, kept.linears, layers)
    yield from activations.of_adapted_experts(shape, training, strategy)
    yield from passing_layers(shape, training)
    yield from further_chunks(shape, training)
    gathers = strategy.data == "fsdp" and strategy.replicas > 1
    if training.method == "qlora":
        yield term(
            "a linear out of NF4",
            "element * linear / tensor",
            QLORA,
            element=precision.activation,
            linear=shape.widest_linear,
            tensor=strategy.tensor,
        )
    if gathers:
        size = NF4_BYTES if training.method == "qlora" else precision.activation
        experts = shape.expert_parameters / max(1, shape.layers - shape.dense_layers)
        linears = shape.layer_parameters - experts
        yield term(
            "two gathered layers",
            "2 * size * (linears + experts) / tensor",
            FSDP,
            size=size,
            linears=linears,
            experts=0 if training.method == "qlora" else experts,
            tensor=strategy.tensor,
        )
        tables = (1 if shape.tied else 2) * shape.table_parameters
        yield term(
            "gathered tables",
            "element * tables / tensor",
            FSDP,
            element=precision.activation,
            tables=tables,
            tensor=strategy.tensor,
        )
    elif precision.copies:
        yield term(
            "copies that autocast keeps",
            "size * elements",
            OWN,
            size=precision.copies,
            elements=trained,
        )


def _checkpoint_terms(
    training: TrainingSetup, strategy: Strategy, trained: float, freed: float
) -> tuple[Term, ...]:
    """Return what a rank's part of a checkpoint takes beyond what a step does; none on a card.

    torch copies weights and moments and makes the bytes of a file of the copies, between steps.

    Args:
        freed: bytes that are free between steps.
    """
    if not training.on_host or strategy.world == 1 or strategy.data in ("diloco", "motley"):
        return ()
    copies = term(
        "a checkpoint's copies, beyond activations",
        "max(0, 2 * 12 * elements / ranks - freed)",
        OWN,
        elements=trained,
        ranks=strategy.replicas,
        freed=freed,
    )
    return (copies,)


def _sum_terms(terms: tuple[Term, ...]) -> int:
    return int(sum(found.value for found in terms))
