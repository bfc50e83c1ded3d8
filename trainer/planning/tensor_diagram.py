"""A block under tensor parallelism as a mermaid diagram, with a model's sizes."""

from __future__ import annotations

from trainer.planning.shapes import ModelShape


def tensor_diagram(shape: ModelShape, tensor: int) -> str:
    """Return how the matrices of a block are sharded, and where its two all-reduces are."""
    hidden, keys = shape.hidden, shape.keys // tensor
    queries, inner = shape.queries // tensor, shape.inner * shape.active_experts // tensor
    up = f"gate, up: 2 x [{inner}, {hidden}]" if shape.gated else f"up: [{inner}, {hidden}]"
    heads = f"{shape.heads // tensor} of {shape.heads} heads a device"
    return f"""flowchart TD
    x["x: every device has all {hidden} columns"] --> qkv
    qkv["q, k, v: column-parallel<br/>[{queries}, {hidden}], 2 x [{keys}, {hidden}] a device"]
    qkv --> attention
    attention["attention: {heads}"] --> out
    out["output: row-parallel<br/>[{hidden}, {queries}] a device"] --> first
    first(("all-reduce 1")) --> middle
    middle["+ x, norm: all {hidden} columns"] --> up
    up["{up.replace(": ", ": column-parallel<br/>", 1)} a device"] --> down
    down["down: row-parallel<br/>[{hidden}, {inner}] a device"] --> second
    second(("all-reduce 2")) --> y["+ x: every device has all {hidden} columns"]
"""
