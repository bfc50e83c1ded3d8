"""Matrix products: every linear, score and gradient of a decoder is one of these."""

from __future__ import annotations

from functools import cache

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.gemm.choice import choose_variant
from trainer.replica.wgpu.kernels.gemm.direct import write_direct_kernel
from trainer.replica.wgpu.kernels.gemm.parts import LONG, OperandLayout
from trainer.replica.wgpu.kernels.gemm.tiled import write_tiled_kernel
from trainer.replica.wgpu.kernels.gemm.variants import Product, Variant
from trainer.replica.wgpu.kernels.source import read_kernel_source


def gemm(
    graph: Graph,
    a: Array,
    b: Array,
    c: Array,
    *,
    m: int,
    n: int,
    k: int,
    trans_a: bool = False,
    trans_b: bool = False,
    batch: int = 1,
    strides: tuple[int, int, int] = (0, 0, 0),
    lda: int | None = None,
    ldb: int | None = None,
    ldc: int | None = None,
    offsets: tuple[int, int, int] = (0, 0, 0),
    alpha: float = 1.0,
    accumulate: bool = False,
    variant: Variant | None = None,
) -> None:
    """Record c[z] `[m, n]` = alpha op(a[z]) op(b[z]); `+=` with `accumulate`.

    a is `[m, k]`, or `[k, m]` with `trans_a`; b is `[k, n]`, or `[n, k]` with `trans_b`, in f32,
    bf16 or NF4. Sums are f32 and their order is fixed by sizes and variant: repeats are bitwise
    equal. Items of a batch are `strides` elements apart, rows `lda`, `ldb` and `ldc` elements (by
    default the length of a row), and everything begins `offsets` elements into its array.
    """
    pitches = (lda or (m if trans_a else k), ldb or (k if trans_b else n), ldc or n)
    extents = ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (m, n))
    assert min(m, n, k, batch) > 0, (m, n, k, batch)
    assert a.kind == c.kind == "f32", (a.kind, c.kind)
    params = {"m": m, "n": n, "k": k, "batch": batch, "alpha": alpha, "accumulate": accumulate}
    wide: list[bool] = []
    for name, array, (rows, columns), pitch, stride, offset in zip(
        "abc", (a, b, c), extents, pitches, strides, offsets, strict=True
    ):
        assert pitch >= columns, f"{columns} elements in a row of {pitch}"
        last = offset + (batch - 1) * stride + (rows - 1) * pitch + columns
        assert last <= array.size, f"element {last} of {array.shape}"
        params |= {f"ld{name}": pitch, f"stride_{name}": stride, f"offset_{name}": offset}
        wide.append(all(value % 4 == 0 for value in (columns, pitch, stride, offset)))
    product = Product(trans_a, trans_b, b.kind, m, n, k)
    chosen = variant or choose_variant(graph.device, product)
    if trans_a and chosen.rows % 4:
        wide[0] = False  # the first row of a tile may be unaligned
    step = chosen.depth if chosen.kind == "tiled" else 4
    layout = OperandLayout(trans_a, trans_b, b.kind, *wide, ragged=k % step != 0, long=k >= LONG)
    tile_rows, tile_columns = chosen.tile
    groups = -(-m // tile_rows) * -(-n // tile_columns) * batch
    arrays = [a, b, *([b.scales] if b.scales else []), c]
    label = f"gemm {product.form} {chosen.name}"
    graph.add(label, write_gemm_kernel(chosen, layout), arrays, params, spread_workgroups(groups))


@cache
def write_gemm_kernel(variant: Variant, layout: OperandLayout) -> str:
    """Return the code of one kernel; its bindings are a, b, (scales of b,) c, parameters."""
    body = (
        write_tiled_kernel(variant, layout)
        if variant.kind == "tiled"
        else write_direct_kernel(variant, layout)
    )
    parts = ["gemm_params", *_operand_parts(layout), "grid"]
    if layout.kind_b == "nf4":
        parts.append("nf4_table" if variant.kind == "tiled" else "nf4_chosen")
    pieces = [read_kernel_source(part).strip() for part in parts]
    return "\n".join([*pieces, *_write_bindings(layout), *body, "}", ""])


def _operand_parts(layout: OperandLayout) -> list[str]:
    """Return the files with the functions that read a and b and write c."""
    width = {True: "wide", False: "narrow"}
    return [
        f"gemm_a_{width[layout.wide_a]}",
        f"gemm_b_{layout.kind_b}_{width[layout.wide_b]}",
        f"gemm_c_{width[layout.wide_c]}",
    ]


def _write_bindings(layout: OperandLayout) -> list[str]:
    packed = "vec2<u32>" if layout.kind_b == "bf16" and layout.wide_b else "u32"
    floats = {True: "vec4<f32>", False: "f32"}
    element_b = floats[layout.wide_b] if layout.kind_b == "f32" else packed
    bindings = [
        ("storage, read", f"a: array<{floats[layout.wide_a]}>"),
        ("storage, read", f"b: array<{element_b}>"),
        *([("storage, read", "scales: array<f32>")] if layout.kind_b == "nf4" else []),
        ("storage, read_write", f"c: array<{floats[layout.wide_c]}>"),
        ("uniform", "p: Params"),
    ]
    return [
        f"@group(0) @binding({number}) var<{space}> {what};"
        for number, (space, what) in enumerate(bindings)
    ]
