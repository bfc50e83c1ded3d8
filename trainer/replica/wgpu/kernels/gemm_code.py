"""WGSL of a matrix product, written for a variant and the layout of its operands.

Everything that changes from call to call (sizes, pitches, strides, offsets, alpha) is read from the
uniform parameters, so that few pipelines serve a whole model. What is written into the code is what
the compiler must see: the unrolled register tile, and how an operand lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from trainer.replica.wgpu.array import Kind
from trainer.replica.wgpu.kernels.source import source

_XYZW = "xyzw"


@dataclass(frozen=True)
class Variant:
    """How the work of a product is divided.

    A thread keeps a tile of `rows` x `columns` results in registers; `down` x `across` threads lie
    side by side in a workgroup.
    """

    kind: Literal["direct", "tiled"]
    """`direct` reads operands straight from memory; `tiled` through workgroup memory."""
    rows: int
    columns: int
    down: int = 1
    across: int = 8
    depth: int = 4
    """k of one tile in workgroup memory (`tiled`)."""
    splits: int = 1
    """Threads that share the k of one tile; their sums are added in order (`direct`)."""

    def __post_init__(self) -> None:
        assert self.rows % 4 == 0 or self.kind == "direct", self
        assert self.columns % 4 == 0, self
        assert self.depth % 4 == 0, self
        assert self.splits == 1 or (self.kind == "direct" and self.down == 1), self

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result that one workgroup computes."""
        return self.rows * self.down, self.columns * self.across

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.down * self.across * self.splits

    @property
    def name(self) -> str:
        """What tables and caches call it."""
        shape = f"{self.kind} {self.rows}x{self.columns} {self.down}x{self.across}"
        if self.kind == "tiled":
            return f"{shape} k{self.depth}"
        return shape if self.splits == 1 else f"{shape} /{self.splits}"


@dataclass(frozen=True)
class Layout:
    """How the operands lie in memory."""

    trans_a: bool
    trans_b: bool
    kind_b: Kind
    wide_a: bool
    """Rows of a can be read four elements at a time; else one by one."""
    wide_b: bool
    wide_c: bool
    ragged: bool
    """k is no multiple of the step that the variant takes: what lies beyond counts as zero."""


@cache
def gemm_code(variant: Variant, layout: Layout) -> str:
    """Return the code of one kernel; its bindings are a, b, (scales of b,) c, parameters."""
    body = _tiled(variant, layout) if variant.kind == "tiled" else _direct(variant, layout)
    return "\n".join([_declarations(variant, layout), source("grid"), *body])


def _declarations(variant: Variant, layout: Layout) -> str:
    scales = layout.kind_b == "nf4"
    element_b = {"f32": "vec4<f32>" if layout.wide_b else "f32"}.get(layout.kind_b, "u32")
    if layout.kind_b == "bf16" and layout.wide_b:
        element_b = "vec2<u32>"
    lines = [
        "struct Params {",
        "  m: u32, n: u32, k: u32, batch: u32,",
        "  lda: u32, ldb: u32, ldc: u32, accumulate: u32,",
        "  stride_a: u32, stride_b: u32, stride_c: u32, alpha: f32,",
        "  offset_a: u32, offset_b: u32, offset_c: u32,",
        "}",
        _binding(0, "a", "vec4<f32>" if layout.wide_a else "f32"),
        _binding(1, "b", element_b),
        *([_binding(2, "scales", "f32")] if scales else []),
        _binding(2 + scales, "c", "vec4<f32>" if layout.wide_c else "f32", "read_write"),
        f"@group(0) @binding({3 + scales}) var<uniform> p: Params;",
        source(f"gemm_{layout.kind_b}_{'wide' if layout.wide_b else 'narrow'}").strip(),
        _load("a", wide=layout.wide_a, along_k=not layout.trans_a, ragged=layout.ragged),
        _load("b", wide=layout.wide_b, along_k=layout.trans_b, ragged=layout.ragged),
        source(f"gemm_store_{'wide' if layout.wide_c else 'narrow'}").strip(),
    ]
    if layout.wide_a:
        lines.append("fn read4_a(i: u32) -> vec4<f32> { return a[i >> 2u]; }")
    else:
        lines.append("fn read_a(i: u32) -> f32 { return a[i]; }")
    return "\n".join(lines)


def _binding(number: int, name: str, element: str, access: str = "read") -> str:
    return f"@group(0) @binding({number}) var<storage, {access}> {name}: array<{element}>;"


def _load(name: str, *, wide: bool, along_k: bool, ragged: bool) -> str:
    """Write the function that reads four neighbours of an operand.

    `x` counts rows of the result for a and columns for b. Beyond k the function returns zeros;
    beyond the last x any element that exists, as that result is not stored.
    """
    count = {"a": "p.m", "b": "p.n"}[name]
    row, col, rows, cols = ("x", "k", count, "p.k") if along_k else ("k", "x", "p.k", count)
    lines = [f"fn load_{name}(origin: u32, x: u32, k: u32) -> vec4<f32> {{"]
    clamped_row = f"min({row}, {rows} - 1u)" if along_k or ragged else row
    lines.append(f"  let line = origin + {clamped_row} * p.ld{name};")
    if wide:
        clamped = col if along_k and not ragged else f"min({col}, {cols} - 4u)"
        lines.append(f"  let four = read4_{name}(line + {clamped});")
        inside = "k < p.k" if ragged else ""
    else:
        items = ", ".join(f"read_{name}(line + min({col} + {i}u, {cols} - 1u))" for i in range(4))
        lines.append(f"  let four = vec4<f32>({items});")
        inside = "k < p.k" if ragged else ""
        if along_k and ragged:
            inside = "vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.k)"
    result = f"select(vec4<f32>(0.0), four, {inside})" if inside else "four"
    return "\n".join([*lines, f"  return {result};", "}"])


def _head(variant: Variant) -> list[str]:
    """Begin `main`: which tile of which batch item this workgroup computes."""
    rows, columns = variant.tile
    return [
        f"@compute @workgroup_size({variant.threads})",
        "fn main(@builtin(workgroup_id) group: vec3<u32>,",
        "        @builtin(num_workgroups) groups: vec3<u32>,",
        "        @builtin(local_invocation_index) lane: u32) {",
        f"  let wide = (p.n + {columns - 1}u) / {columns}u;",
        f"  let tiles = wide * ((p.m + {rows - 1}u) / {rows}u);",
        "  let index = group_index(group, groups);",
        "  let z = index / tiles;",
        "  if (z >= p.batch) { return; }",
        "  let tile = index % tiles;",
        "  let origin_a = p.offset_a + z * p.stride_a;",
        "  let origin_b = p.offset_b + z * p.stride_b;",
        "  let origin_c = p.offset_c + z * p.stride_c;",
    ]


def _accumulators(variant: Variant) -> list[str]:
    return [
        f"  var c{i}_{j} = vec4<f32>(0.0);"
        for i in range(variant.rows)
        for j in range(variant.columns // 4)
    ]


def _four_steps(
    variant: Variant, a: Callable[[int, int], str], b: Callable[[int, int], str]
) -> list[str]:
    """Add four k: `a(i, step)` names a scalar of row i, `b(j, step)` four columns."""
    return [
        f"    c{i}_{j} = fma(vec4<f32>({a(i, step)}), {b(j, step)}, c{i}_{j});"
        for step in range(4)
        for i in range(variant.rows)
        for j in range(variant.columns // 4)
    ]


def _direct(variant: Variant, layout: Layout) -> list[str]:
    rows, columns = variant.tile
    if layout.trans_b:  # neighbours in k are neighbours in memory: give them to neighbour lanes
        place = f"lane / {variant.splits}u", f"lane % {variant.splits}u"
    else:
        place = (
            f"lane % {variant.across * variant.down}u",
            f"lane / {variant.across * variant.down}u",
        )
    lines = _head(variant)
    lines += [
        f"  let place = {place[0]};",
        f"  let split = {place[1]};",
        f"  let m0 = tile / wide * {rows}u + place / {variant.across}u * {variant.rows}u;",
        f"  let n0 = tile % wide * {columns}u + place % {variant.across}u * {variant.columns}u;",
        *_accumulators(variant),
        f"  for (var k = split * 4u; k < p.k; k += {4 * variant.splits}u) {{",
    ]
    if layout.trans_a:
        lines += [
            f"    let a{i}_{s} = load_a(origin_a, m0 + {4 * i}u, k + {s}u);"
            for s in range(4)
            for i in range(-(-variant.rows // 4))
        ]
    else:
        lines += [f"    let a{i} = load_a(origin_a, m0 + {i}u, k);" for i in range(variant.rows)]
    if layout.trans_b:
        lines += [f"    let w{j} = load_b(origin_b, n0 + {j}u, k);" for j in range(variant.columns)]
        lines += [
            f"    let b{j}_{s} = vec4<f32>("
            + ", ".join(f"w{4 * j + r}.{_XYZW[s]}" for r in range(4))
            + ");"
            for s in range(4)
            for j in range(variant.columns // 4)
        ]
    else:
        lines += [
            f"    let b{j}_{s} = load_b(origin_b, n0 + {4 * j}u, k + {s}u);"
            for s in range(4)
            for j in range(variant.columns // 4)
        ]
    lines += _four_steps(
        variant,
        (lambda i, s: f"a{i // 4}_{s}.{_XYZW[i % 4]}")
        if layout.trans_a
        else (lambda i, s: f"a{i}.{_XYZW[s]}"),
        lambda j, s: f"b{j}_{s}",
    )
    lines.append("  }")
    tile = [(i, j) for i in range(variant.rows) for j in range(variant.columns // 4)]
    if variant.splits == 1:
        lines += [f"  store(origin_c, m0 + {i}u, n0 + {4 * j}u, c{i}_{j});" for i, j in tile]
        return [*lines, "}"]
    count = variant.across * len(tile)
    lines += [
        f"  let mine = split * {count}u + place * {len(tile)}u;",
        *(f"  partial[mine + {number}u] = c{i}_{j};" for number, (i, j) in enumerate(tile)),
        "  workgroupBarrier();",
        f"  for (var v = lane; v < {count}u; v += {variant.threads}u) {{",
        "    var sum = partial[v];",
        f"    for (var s = 1u; s < {variant.splits}u; s++) {{ sum += partial[s * {count}u + v]; }}",
        f"    let own = v % {len(tile)}u;",
        f"    let row = tile / wide * {rows}u + own / {variant.columns // 4}u;",
        f"    let col = tile % wide * {columns}u + v / {len(tile)}u * {variant.columns}u"
        f" + own % {variant.columns // 4}u * 4u;",
        "    store(origin_c, row, col, sum);",
        "  }",
        "}",
    ]
    return [f"var<workgroup> partial: array<vec4<f32>, {count * variant.splits}>;", *lines]


def _tiled(variant: Variant, layout: Layout) -> list[str]:
    rows, columns = variant.tile
    depth = variant.depth
    lines = [
        f"var<workgroup> tile_a: array<vec4<f32>, {depth * rows // 4}>;",
        f"var<workgroup> tile_b: array<vec4<f32>, {depth * columns // 4}>;",
        *_head(variant),
        f"  let tx = lane % {variant.across}u;",
        f"  let ty = lane / {variant.across}u;",
        f"  let m0 = tile / wide * {rows}u;",
        f"  let n0 = tile % wide * {columns}u;",
        *_accumulators(variant),
        f"  for (var k0 = 0u; k0 < p.k; k0 += {depth}u) {{",
        *_fill(variant, "a", rows, along_k=not layout.trans_a),
        *_fill(variant, "b", columns, along_k=layout.trans_b),
        "    workgroupBarrier();",
        f"    for (var k = 0u; k < {depth}u; k++) {{",
    ]
    for i in range(variant.rows // 4):
        lines.append(f"      let a{i} = tile_a[k * {rows // 4}u + ty + {i * variant.down}u];")
    for j in range(variant.columns // 4):
        lines.append(f"      let b{j} = tile_b[k * {columns // 4}u + tx + {j * variant.across}u];")
    lines += [
        f"      c{i}_{j} = fma(vec4<f32>(a{i // 4}.{_XYZW[i % 4]}), b{j}, c{i}_{j});"
        for i in range(variant.rows)
        for j in range(variant.columns // 4)
    ]
    lines += ["    }", "    workgroupBarrier();", "  }"]
    # Fours of a thread lie `down` and `across` fours apart, so that neighbours read neighbours.
    lines += [
        f"  store(origin_c, m0 + (ty + {i // 4 * variant.down}u) * 4u + {i % 4}u,"
        f" n0 + (tx + {j * variant.across}u) * 4u, c{i}_{j});"
        for i in range(variant.rows)
        for j in range(variant.columns // 4)
    ]
    return [*lines, "}"]


def _fill(variant: Variant, name: str, width: int, *, along_k: bool) -> list[str]:
    """Copy one tile into workgroup memory, [k][x / 4] of four x each."""
    start = {"a": "m0", "b": "n0"}[name]
    fours, threads = width // 4, variant.threads
    if not along_k:
        return [
            f"    for (var t = lane; t < {variant.depth * fours}u; t += {threads}u) {{",
            f"      tile_{name}[t] ="
            f" load_{name}(origin_{name}, {start} + t % {fours}u * 4u, k0 + t / {fours}u);",
            "    }",
        ]
    steps = variant.depth // 4
    lines = [
        f"    for (var t = lane; t < {fours * steps}u; t += {threads}u) {{",
        f"      let k = t % {steps}u * 4u;",
        f"      let four = t / {steps}u;",
    ]
    lines += [
        f"      let r{r} = load_{name}(origin_{name}, {start} + four * 4u + {r}u, k0 + k);"
        for r in range(4)
    ]
    lines += [
        f"      tile_{name}[(k + {s}u) * {fours}u + four] = vec4<f32>("
        + ", ".join(f"r{r}.{_XYZW[s]}" for r in range(4))
        + ");"
        for s in range(4)
    ]
    return [*lines, "    }"]
