"""A block under tensor parallelism as a mermaid diagram, with a model's sizes."""

from __future__ import annotations

from trainer.planning.shapes import ModelShape


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
