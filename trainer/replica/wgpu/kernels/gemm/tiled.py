"""Kernels whose workgroups first copy tiles of both operands into workgroup memory."""

from __future__ import annotations

from trainer.replica.wgpu.kernels.gemm.parts import (
    XYZW,
    Operand,
    OperandLayout,
    begin_main,
    component_vector,
    make_operands,
    sum_vectors,
    write_k_loop,
)
from trainer.replica.wgpu.kernels.gemm.variants import Variant

_UNROLLED = 8
"""k of one round of the inner loop."""


def write_tiled_kernel(variant: Variant, layout: OperandLayout) -> list[str]:
    """Write a kernel whose workgroup copies tiles of a and b into workgroup memory.

    Copies and products are unrolled, which saves rounds of loops. llvmpipe ends a thread's loops,
    without an error, after 65,535 rounds in all: k / 8 + k / depth leave room for any vocabulary.
    """
    a, b = make_operands(layout)
    rows, columns = variant.tile
    depth, down, across = variant.depth, variant.down, variant.across
    # A thread's fours are `down` and `across` fours apart, so that neighbours read neighbours.
    body = [
        *_write_tile_copy(variant, a, "m_tile", rows // 4),
        *_write_tile_copy(variant, b, "n_tile", columns // 4),
        "    workgroupBarrier();",
        f"    for (var step = 0u; step < {depth}u; step += {_UNROLLED}u) {{",
        *(line for s in range(_UNROLLED) for line in _write_products(variant, f"(step + {s}u)")),
        "    }",
        "    workgroupBarrier();",
    ]
    return [
        f"var<workgroup> tile_a: array<vec4<f32>, {depth * rows // 4}>;",
        f"var<workgroup> tile_b: array<vec4<f32>, {depth * columns // 4}>;",
        *begin_main(variant),
        f"  let tx = lane % {across}u;",
        f"  let ty = lane / {across}u;",
        *_fill_table(layout, variant),
        *write_k_loop(variant, layout, "0u", body),
        *(
            f"  store(origin_c, m_tile + (ty + {i // 4 * down}u) * 4u + {i % 4}u,"
            f" n_tile + (tx + {j * across}u) * 4u, c{i}_{j});"
            for i, j in sum_vectors(variant)
        ),
    ]


def _write_products(variant: Variant, step: str) -> list[str]:
    """Write the products of one k of the tiles."""
    rows, columns = variant.tile
    return [
        "      {",
        *(
            f"        let a{i} = tile_a[{step} * {rows // 4}u + ty + {i * variant.down}u];"
            for i in range(variant.rows // 4)
        ),
        *(
            f"        let b{j} = tile_b[{step} * {columns // 4}u + tx + {j * variant.across}u];"
            for j in range(variant.columns // 4)
        ),
        *(
            f"        c{i}_{j} = fma(vec4<f32>(a{i // 4}.{XYZW[i % 4]}), b{j}, c{i}_{j});"
            for i, j in sum_vectors(variant)
        ),
        "      }",
    ]


def _fill_table(layout: OperandLayout, variant: Variant) -> list[str]:
    if layout.kind_b != "nf4":
        return []
    return [
        f"  for (var t = lane; t < 16u; t += {variant.threads}u) {{ table[t] = NF4[t]; }}",
        "  workgroupBarrier();",
    ]


def _write_tile_copy(variant: Variant, operand: Operand, start: str, fours: int) -> list[str]:
    """Write the copy of one tile, [k][four of x] in workgroup memory."""
    tile, depth = f"tile_{operand.name}", variant.depth
    if not operand.along_k:
        place = operand.place(f"{start} + t % {fours}u * 4u")
        load = operand.load(place, f"at + t / {fours}u")
        return _write_item_loop(variant.threads, depth * fours, [f"      {tile}[t] = {load};"])
    steps = depth // 4
    lines = [f"      let step = t % {steps}u * 4u;", f"      let four = t / {steps}u;"]
    for r in range(4):
        place = operand.place(f"{start} + four * 4u + {r}u")
        lines.append(f"      let r{r} = {operand.load(place, 'at + step')};")
    for s in range(4):
        line = component_vector(["r0", "r1", "r2", "r3"], s)
        lines.append(f"      {tile}[(step + {s}u) * {fours}u + four] = {line};")
    return _write_item_loop(variant.threads, fours * steps, lines)


def _write_item_loop(threads: int, items: int, lines: list[str]) -> list[str]:
    """Write lines for the items `t` of a thread, every `threads`-th one."""
    shared: list[str] = []
    for first in range(0, items, threads):
        some = first + threads > items
        shared += [
            f"    if (lane + {first}u < {items}u) {{" if some else "    {",
            f"      let t = lane + {first}u;",
            *lines,
            "    }",
        ]
    return shared
