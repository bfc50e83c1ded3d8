"""Causal attention in one kernel: scores stay in registers, and no window of them is written.

FlashAttention (Dao et al., arXiv 2205.14135) with an online softmax (Milakov and Gimelshein,
arXiv 1805.02867). Of a row, with m its largest score so far, l the sum of the exponentials and o
the output, each block of scores s_j and values v_j makes

    m' = max(m, s_j),  l' = l e^(m - m') + sum_j e^(s_j - m'),
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j;  in the end the output is o / l

A workgroup is one subgroup of 8 threads with 16 rows of queries of one head. Of the scores a thread
has 4 of 32 keys, of the output every eighth vector of columns; it broadcasts what all threads need,
queries and then exponentials. Keys after the last row are never read.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread
from trainer.replica.wgpu.kernels.gemm.choice import Variants
from trainer.replica.wgpu.kernels.gemm.parts import XYZW, column
from trainer.replica.wgpu.kernels.gemm.variants import LANES
from trainer.replica.wgpu.kernels.source import source

if TYPE_CHECKING:
    from trainer.replica.wgpu.gpu.device import Device

_ROWS = 16
_KEYS = 4 * LANES


def serves(device: Device | None, head_dim: int) -> bool:
    """Return whether this kernel is faster, which was measured on llvmpipe alone.

    On a GPU its sums would not fit into a thread's registers. Wider heads take long to compile.
    """
    if device is None or head_dim % (4 * LANES) or head_dim > 128:
        return False
    return device.adapter.software and Variants(device).sharing


def flash_attention(
    graph: Graph, queries: Array, keys: Array, values: Array, out: Array, *, scale: float
) -> None:
    """Record out `[B, Hq, T, d]` = softmax(scale Q K^T, causal) V.

    Queries are `[B, Hq, T, d]`, keys and values `[B, Hkv, T, d]`; Hq / Hkv consecutive heads share
    theirs. d is a multiple of 32.
    """
    batch, heads, length, width = queries.shape
    assert out.shape == queries.shape, (out.shape, queries.shape)
    assert keys.shape == values.shape, (keys.shape, values.shape)
    assert keys.shape == (batch, keys.shape[1], length, width), (keys.shape, queries.shape)
    tiles = -(-length // _ROWS)
    params = {
        "heads": batch * heads,
        "group": heads // keys.shape[1],
        "length": length,
        "scale": scale,
    }
    arrays = [queries, keys, values, out]
    graph.add("flash_attention", _code(width), arrays, params, spread(batch * heads * tiles))


@cache
def _code(width: int) -> str:
    """Write the kernel for heads of that width."""
    vectors = width // 4
    own = range(vectors // LANES)
    rows = range(_ROWS)
    bound = [("read", name) for name in ("queries", "keys", "values")] + [("read_write", "out")]
    return "\n".join(
        [
            "struct Params { heads: u32, group: u32, length: u32, scale: f32 }",
            *(
                f"@group(0) @binding({n}) var<storage, {access}> {name}: array<vec4<f32>>;"
                for n, (access, name) in enumerate(bound)
            ),
            "@group(0) @binding(4) var<uniform> p: Params;",
            source("grid"),
            f"@compute @workgroup_size({LANES})",
            "fn main(@builtin(workgroup_id) group: vec3<u32>,",
            "        @builtin(num_workgroups) groups: vec3<u32>,",
            "        @builtin(subgroup_invocation_id) peer: u32) {",
            "  let length = p.length;",
            "  let scale = p.scale;",
            f"  let tiles = (length + {_ROWS - 1}u) / {_ROWS}u;",
            "  let index = group_index(group, groups);",
            "  let head = index / tiles;",
            "  if (head >= p.heads) { return; }",
            f"  let first = index % tiles * {_ROWS}u;",
            f"  let stop = min(first + {_ROWS}u, length);",
            f"  let origin = head * length * {vectors}u;",
            f"  let shared_origin = head / p.group * length * {vectors}u;",
            *(
                f"  let query{b} = origin + min(first + peer + {b * LANES}u, length - 1u)"
                f" * {vectors}u;"
                for b in range(_ROWS // LANES)
            ),
            *(f"  var largest{i} = -3.4e38;" for i in rows),
            *(f"  var sum{i} = 0.0;" for i in rows),
            *(f"  var o{i}_{c} = vec4<f32>(0.0);" for i in rows for c in own),
            f"  for (var block = 0u; block < stop; block += {_KEYS}u) {{",
            *_scores(vectors),
            *_rescale(own),
            *_contract(vectors, own),
            "  }",
            *(
                f"  if (first + {i}u < length) {{ out[origin + (first + {i}u) * {vectors}u"
                f" + {c * LANES}u + peer] = o{i}_{c} / sum{i}; }}"
                for i in rows
                for c in own
            ),
            "}",
            "",
        ]
    )


def _scores(vectors: int) -> list[str]:
    """Write s0 to s15: a row's scores with the thread's four keys."""
    return [
        "    let key = block + 4u * peer;",
        *(
            f"    let key{j} = shared_origin + min(key + {j}u, length - 1u) * {vectors}u;"
            for j in range(4)
        ),
        *(f"    var s{i} = vec4<f32>(0.0);" for i in range(_ROWS)),
        f"    for (var at = 0u; at < {vectors}u; at++) {{",
        *(f"      let k{j} = keys[key{j} + at];" for j in range(4)),
        *(f"      let t{x} = {column([f'k{j}' for j in range(4)], x)};" for x in range(4)),
        *(f"      let queries{b} = queries[query{b} + at];" for b in range(_ROWS // LANES)),
        *(
            f"      let q{i} = subgroupBroadcast(queries{i // LANES}, {i % LANES}u);"
            for i in range(_ROWS)
        ),
        *(
            f"      s{i} = fma(vec4<f32>(q{i}.{XYZW[x]}), t{x}, s{i});"
            for x in range(4)
            for i in range(_ROWS)
        ),
        "    }",
    ]


def _rescale(own: range) -> list[str]:
    """Write s0 to s15 becoming exponentials, and sums and outputs following the largest score."""
    lines = [
        "    let unseen = vec4<f32>(-3.4e38);",
        "    let positions = vec4<u32>(key, key + 1u, key + 2u, key + 3u);",
    ]
    for i in range(_ROWS):
        four = f"max(max(s{i}.x, s{i}.y), max(s{i}.z, s{i}.w))"
        seen = f"positions <= vec4<u32>(first + {i}u)"
        lines += [
            f"    s{i} = select(unseen, scale * s{i}, {seen});",
            f"    let larger{i} = max(largest{i}, subgroupMax({four}));",
            f"    s{i} = exp(s{i} - larger{i});",
            f"    let factor{i} = exp(largest{i} - larger{i});",
            f"    largest{i} = larger{i};",
            f"    sum{i} = sum{i} * factor{i} + subgroupAdd(s{i}.x + s{i}.y + s{i}.z + s{i}.w);",
            *(f"    o{i}_{c} *= factor{i};" for c in own),
        ]
    return lines


def _contract(vectors: int, own: range) -> list[str]:
    """Write the outputs += exponentials times values, the keys of one thread after another's."""
    lines: list[str] = []
    for lane in range(LANES):
        lines += [
            "    {",
            *(f"      let e{i} = subgroupBroadcast(s{i}, {lane}u);" for i in range(_ROWS)),
        ]
        for j in range(4):
            key = f"min(block + {4 * lane + j}u, length - 1u)"
            lines += [
                "      {",
                f"        let place = shared_origin + {key} * {vectors}u + peer;",
                *(f"        let v{c} = values[place + {c * LANES}u];" for c in own),
                *(
                    f"        o{i}_{c} = fma(vec4<f32>(e{i}.{XYZW[j]}), v{c}, o{i}_{c});"
                    for i in range(_ROWS)
                    for c in own
                ),
                "      }",
            ]
        lines.append("    }")
    return lines
