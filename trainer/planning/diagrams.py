"""Diagrams in Mermaid, with a plan's sizes: memory and communication in a step, and a block under
tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainer.planning.memory import NF4_BYTES, trained_parameters
from trainer.planning.schedules import split_layers, timeline
from trainer.planning.shapes import ModelShape
from trainer.planning.strategies import Request, StrategyOption, plan
from trainer.planning.strategy import Strategy
from trainer.planning.time import bus_factor

Kind = Literal["ddp", "fsdp", "pp", "group"]


def step_diagram(kind: Kind, request: Request) -> str:
    """Return a step on the devices of the cluster's first host as a mermaid sequence diagram.

    Args:
        kind: `pp` is a pipeline by 1F1B, `group` a replica group that holds copies.
    """
    world = request.cluster.groups[0].devices
    strategy = {
        "ddp": Strategy(world=world),
        "fsdp": Strategy(world=world, data="fsdp"),
        "pp": Strategy(world=world, stages=world),
        "group": Strategy(world=world, data="motley"),
    }[kind]
    drawing = _Drawing(request, plan(request, strategy, request.method))
    steps = {
        "ddp": drawing.ddp,
        "fsdp": drawing.fsdp,
        "pp": drawing.pipeline,
        "group": drawing.group,
    }[kind]
    return "\n".join(["sequenceDiagram", *("    " + line for line in steps())]) + "\n"


class _Drawing:
    """The lines of a diagram; all bytes are of one device."""

    def __init__(self, request: Request, option: StrategyOption) -> None:
        self._shape, self._training, self._option = request.shape, option.training, option
        self._world = option.strategy.world
        self._devices = range(self._world)
        self._all = f"Note over d0,d{self._world - 1}"
        self._trained = trained_parameters(self._shape, self._training)
        rows, length = self._training.rows, self._training.length
        parts = option.strategy.microbatches
        self._rounds = (
            f"loop {parts} micro-batch{'es'[: 2 * (parts > 1)]} of {rows} x {length} tokens"
        )

    def ddp(self) -> Iterator[str]:
        """Copies; one all-reduce a step."""
        yield from self._participants()
        yield f"{self._all}: each holds all {self._shape.layers} layers<br/>{self._held()}"
        yield self._rounds
        yield f"    {self._all}: forward and backward, each of its own samples"
        yield "end"
        sent = self._gradients(self._trained) * bus_factor("all_reduce", self._world)
        yield "par in buckets, beside the last backward"
        yield from self._ring(f"all-reduce: {_size(sent)} of gradients")
        yield "end"
        yield f"{self._all}: the same update on each"

    def fsdp(self) -> Iterator[str]:
        """Sharded copies; layers are gathered."""
        shape, training = self._shape, self._training
        share = bus_factor("all_gather", self._world)
        stored = NF4_BYTES if training.method == "qlora" else training.precision.activation
        gather = f"all-gather: {_size(share * stored * shape.layer_parameters)} of weights"
        reduced = _size(share * self._gradients(self._trained) / shape.layers)
        yield from self._participants()
        yield f"{self._all}: each holds 1/{self._world} of every layer<br/>{self._held()}"
        yield self._rounds
        yield f"    loop forward, each of {shape.layers} layers"
        yield from self._ring(gather, "        ")
        yield "    end"
        yield "    loop backward, each layer again"
        yield from self._ring(gather, "        ")
        yield from self._ring(f"reduce-scatter: {reduced} of gradients", "        ")
        yield "    end"
        yield "end"
        yield f"{self._all}: each updates its part"

    def pipeline(self) -> Iterator[str]:
        """Stages; activations cross between them, in the order of 1F1B."""
        stages, every = self._world, self._option.strategy.microbatches
        drawn = min(every, 2 * stages)
        each = self._training.tokens * self._shape.hidden * self._training.precision.activation
        yield from self._participants()
        for stage, layers in enumerate(split_layers(self._shape.layers, stages)):
            ends = {0: "the embedding, ", stages - 1: "the head, "}.get(stage, "")
            yield f"Note over d{stage}: {ends}layers {layers.start} to {layers.stop - 1}"
        yield f"{self._all}: the one that needs most<br/>{self._held()}"
        actions = [
            (action.stop, stage, action)
            for stage, mine in enumerate(timeline("1f1b", stages, drawn, 1))
            for action in mine
        ]
        for _, stage, action in sorted(actions, key=lambda entry: entry[:2]):
            number = action.microbatch + 1
            if action.kind == "forward" and stage < stages - 1:
                yield f"d{stage}->>d{stage + 1}: forward {number}: {_size(each)} of hidden states"
            elif action.kind == "backward" and stage:
                yield f"d{stage}->>d{stage - 1}: backward {number}: {_size(each)}, their gradients"
        if drawn < every:
            yield f"{self._all}: and so on, to micro-batch {every}"
        yield f"{self._all}: each updates its layers"

    def group(self) -> Iterator[str]:
        """Copies that are one worker of the exchange."""
        gradients, weights = self._gradients(self._trained), 4 * self._trained
        yield "participant c as coordinator"
        yield from self._participants(leader=True)
        yield f"{self._all}: each holds all {self._shape.layers} layers<br/>{self._held()}"
        yield "c->>d0: which samples are the group's"
        for member in self._devices[1:]:
            yield f"d0->>d{member}: its part of the samples"
        yield f"{self._all}: forward and backward, in micro-batches"
        yield "par block by block, beside the last backward"
        for member in self._devices[1:]:
            yield f"    d{member}->>d0: reduce: {_size(gradients)} of gradients"
        yield "    d0->>c: their sum, in the run's codec"
        yield "end"
        yield "c->>d0: the mean of all workers, and the commit"
        for member in self._devices[1:]:
            yield f"d0->>d{member}: broadcast: {_size(weights)} of new weights"

    def _participants(self, *, leader: bool = False) -> Iterator[str]:
        for device in self._devices:
            yield f"participant d{device} as device {device}" + (
                ", leader" if leader and not device else ""
            )

    def _held(self) -> str:
        parts = self._option.memory.bytes().items()
        return "<br/>".join(f"{name} {_size(size)}" for name, size in parts if size)

    def _ring(self, what: str, indent: str = "    ") -> Iterator[str]:
        for device in self._devices:
            yield f"{indent}d{device}->>d{(device + 1) % self._world}: {what}"

    def _gradients(self, elements: float) -> float:
        return elements * self._training.precision.gradient


def _size(count: float) -> str:
    if count < 1 << 20:
        return f"{count / 2**10:.0f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 1 << 30 else f"{count / 2**30:.2f} GiB"


def tensor_diagram(shape: ModelShape, tensor: int, *, sequence: bool = False) -> str:
    """Return how the matrices of a block are sharded, and what the devices exchange.

    Args:
        sequence: they share the tokens between the products too.
    """
    hidden, keys = shape.hidden, shape.keys // tensor
    queries, inner = shape.queries // tensor, shape.inner * shape.active_experts // tensor
    up = f"gate, up: 2 x [{inner}, {hidden}]" if shape.gated else f"up: [{inner}, {hidden}]"
    heads = f"{shape.heads // tensor} of {shape.heads} heads a device"
    columns = f"all {hidden} columns"
    if sequence:
        columns += f" of 1/{tensor} of the tokens"
        first, second, after = "reduce-scatter 1", "reduce-scatter 2", ("before", "between")
    else:
        first, second, after = "all-reduce 1", "all-reduce 2", ("qkv", "up")
    lines = [
        f'x["x: every device has {columns}"] --> {after[0]}',
        *(['before(("norm, all-gather 1")) --> qkv'] if sequence else []),
        f'qkv["q, k, v: column-parallel<br/>[{queries}, {hidden}], 2 x [{keys}, {hidden}]'
        ' a device"]',
        "qkv --> attention",
        f'attention["attention: {heads}"] --> out',
        f'out["output: row-parallel<br/>[{hidden}, {queries}] a device"] --> first',
        f'first(("{first}")) --> middle',
        f'middle["+ x, norm: {columns}"] --> {after[1]}',
        *(['between(("all-gather 2")) --> up'] if sequence else []),
        f'up["{up.replace(": ", ": column-parallel<br/>", 1)} a device"] --> down',
        f'down["down: row-parallel<br/>[{hidden}, {inner}] a device"] --> second',
        f'second(("{second}")) --> y["+ x: every device has {columns}"]',
    ]
    return "\n".join(["flowchart TD", *("    " + line for line in lines)]) + "\n"
