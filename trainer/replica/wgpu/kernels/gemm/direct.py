"""Kernels that read both operands of a product from memory."""

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


def write_direct_kernel(variant: Variant, layout: OperandLayout) -> list[str]:
    """Write a kernel that reads a and b from memory, four k a step."""
    a, b = make_operands(layout)
    rows, columns, splits = variant.rows, variant.columns, variant.splits
    threads = variant.down * variant.across
    # Neighbours in memory go to neighbour threads: if b lies along k these are the splits.
    split, spot = f"lane / {threads}u", f"lane % {threads}u"
    if b.along_k:
        split, spot = f"lane % {splits}u", f"lane / {splits}u"
    places, loads = _load_a(variant, a)
    lines = [
        *begin_main(variant),
        f"  let split = {split};",
        f"  let spot = {spot};",
        f"  let m0 = m_tile + spot / {variant.across}u * {rows}u;",
        f"  let n0 = n_tile + spot % {variant.across}u * {columns}u;",
        *places,
        *(
            f"  let place_b{j} = {b.place(f'n0 + {j}u')};"
            for j in range(0, columns, 1 if b.along_k else 4)
        ),
    ]
    body = loads
    if b.along_k:
        body += [f"    let w{j} = {b.load(f'place_b{j}', 'at')};" for j in range(columns)]
    for s in range(4):
        for j in range(columns // 4):
            four = (
                component_vector([f"w{4 * j + r}" for r in range(4)], s)
                if b.along_k
                else b.load(f"place_b{4 * j}", f"at + {s}u")
            )
            body.append(f"    let b{j}_{s} = {four};")
    fours = -(-rows // 4)
    for s in range(4):
        for i, j in sum_vectors(variant):
            scalar = f"a{i}.{XYZW[s]}" if a.along_k else f"a{s * fours + i // 4}.{XYZW[i % 4]}"
            body.append(f"    c{i}_{j} = fma(vec4<f32>({scalar}), b{j}_{s}, c{i}_{j});")
    lines += write_k_loop(variant, layout, "split * 4u", body)
    if splits > 1:
        count = variant.threads * len(sum_vectors(variant))
        memory = f"var<workgroup> partial: array<vec4<f32>, {count}>;"
        return [memory, *lines, *_add_splits(variant)]
    stores = [
        f"  store(origin_c, m0 + {i}u, n0 + {4 * j}u, c{i}_{j});" for i, j in sum_vectors(variant)
    ]
    return [*lines, *stores]


def _load_a(variant: Variant, a: Operand) -> tuple[list[str], list[str]]:
    """Return the code that reads four k of a's rows into a0, a1..., before the loop and in it.

    If a lies along k there is one vector a row, else one every four rows of each k.
    """
    fours = -(-variant.rows // 4)
    places: list[str] = []
    loads: list[str] = []
    for i in range(variant.rows if a.along_k else fours):
        row = i if a.along_k else 4 * i
        places.append(f"  let place_a{i} = {a.place(f'm0 + {row}u')};")
        for s in range(1 if a.along_k else 4):
            load = a.load(f"place_a{i}", f"at + {s}u")
            loads.append(f"    let a{s * fours + i} = {load};")
    return places, loads


def _add_splits(variant: Variant) -> list[str]:
    """Write the sums of all splits, then add and store them, one vector a thread at a time."""
    own = len(sum_vectors(variant))
    count = variant.across * own
    fours = variant.columns // 4
    return [
        f"  let mine = (split * {variant.across}u + spot) * {own}u;",
        *(
            f"  partial[mine + {number}u] = c{i}_{j};"
            for number, (i, j) in enumerate(sum_vectors(variant))
        ),
        "  workgroupBarrier();",
        f"  for (var v = lane; v < {count}u; v += {variant.threads}u) {{",
        "    var sum = partial[v];",
        f"    for (var s = 1u; s < {variant.splits}u; s++) {{ sum += partial[s * {count}u + v]; }}",
        f"    let row = m_tile + v % {own}u / {fours}u;",
        f"    let col = n_tile + v / {own}u * {variant.columns}u + v % {fours}u * 4u;",
        "    store(origin_c, row, col, sum);",
        "  }",
    ]
