"""The common parts of matrix product kernels: operands in memory, and the start of `main`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu.kernels.gemm.variants import Variant

XYZW = "xyzw"
LONG = 4096
"""Products of this k and more are added up in partial sums."""
PARTIAL = 256
"""Products that a thread adds to one partial sum."""


@dataclass(frozen=True)
class OperandLayout:
    """The layout of the operands in memory."""

    trans_a: bool
    trans_b: bool
    kind_b: Kind
    wide_a: bool
    """Rows of a can be read four elements at a time; else one by one."""
    wide_b: bool
    wide_c: bool
    ragged: bool
    """k is not a multiple of the variant's step: elements beyond count as zero."""
    long: bool
    """k is that of a vocabulary: products are added up in partial sums first."""


@dataclass(frozen=True)
class Operand:
    """Expressions that read four neighbours of a or b.

    `x` counts rows of the result for a, columns for b; rows of memory run along k or along x.
    Beyond k everything is zero. Beyond the last x it is arbitrary, since no such result is stored.
    """

    name: str
    along_k: bool
    wide: bool
    ragged: bool

    def place(self, x: str) -> str:
        """Return the part of an address that does not depend on k."""
        size = {"a": "m", "b": "n"}[self.name]
        if self.along_k:
            return f"origin_{self.name} + min({x}, {size} - 1u) * ld{self.name}"
        return f"min({x}, {size} - 4u)" if self.wide else x

    def load(self, place: str, at: str) -> str:
        """Return the elements at k = `at` and the next three, or, at that k alone, from x on."""
        name, size = self.name, {"a": "m", "b": "n"}[self.name]
        if self.along_k:
            if not (self.wide and self.ragged):
                return f"load_{name}({place}, {at}, k)"
            four = f"load_{name}({place}, min({at}, k - 4u), k)"
        else:
            row = f"min({at}, k - 1u)" if self.ragged else f"({at})"
            four = f"load_{name}(origin_{name} + {row} * ld{name}, {place}, {size})"
            if not self.ragged:
                return four
        return f"select(vec4<f32>(0.0), {four}, {at} < k)"


def make_operands(layout: OperandLayout) -> tuple[Operand, Operand]:
    """Return a and b."""
    return (
        Operand("a", not layout.trans_a, layout.wide_a, layout.ragged),
        Operand("b", layout.trans_b, layout.wide_b, layout.ragged),
    )


def begin_main(variant: Variant) -> list[str]:
    """Begin `main`: the workgroup's tile and batch item.

    Neighbours in the grid share columns: b, often the larger, then stays in the cache. Parameters
    are read once, as a read in the loop costs more than a multiplication.
    """
    rows, columns = variant.tile
    return [
        f"@compute @workgroup_size({variant.threads})",
        "fn main(@builtin(workgroup_id) group: vec3<u32>,",
        "        @builtin(num_workgroups) groups: vec3<u32>,",
        "        @builtin(local_invocation_index) lane: u32) {",
        *(f"  let {name} = p.{name};" for name in ("m", "n", "k", "lda", "ldb")),
        f"  let tall = (m + {rows - 1}u) / {rows}u;",
        f"  let tiles = tall * ((n + {columns - 1}u) / {columns}u);",
        "  let index = group_index(group, groups);",
        "  let z = index / tiles;",
        "  if (z >= p.batch) { return; }",
        f"  let m_tile = index % tiles % tall * {rows}u;",
        f"  let n_tile = index % tiles / tall * {columns}u;",
        *(f"  let origin_{name} = p.offset_{name} + z * p.stride_{name};" for name in "abc"),
        *(f"  var c{i}_{j} = vec4<f32>(0.0);" for i, j in sum_vectors(variant)),
    ]


def write_k_loop(variant: Variant, layout: OperandLayout, start: str, body: list[str]) -> list[str]:
    """Write the loop over k, `at`, around a body that adds to the sums.

    The gradient of the logits of a real vocabulary has one large element among 50,000 to 150,000
    small ones: added to one fp32 sum after the large one, most of them are rounded away. With
    partial sums the error grows with their length plus their number, not with k (Blanchard, Higham
    and Mary, SIAM J. Sci. Comput. 42, 2020).
    """
    step = variant.depth * variant.splits
    if not layout.long:
        return [f"  for (var at = {start}; at < k; at += {step}u) {{", *body, "  }"]
    some = PARTIAL * variant.splits
    return [
        f"  for (var part = 0u; part < k; part += {some}u) {{",
        *(f"  let sum{i}_{j} = c{i}_{j};" for i, j in sum_vectors(variant)),
        *(f"  c{i}_{j} = vec4<f32>(0.0);" for i, j in sum_vectors(variant)),
        f"  let part_end = min(part + {some}u, k);",
        f"  for (var at = part + {start}; at < part_end; at += {step}u) {{",
        *body,
        "  }",
        *(f"  c{i}_{j} += sum{i}_{j};" for i, j in sum_vectors(variant)),
        "  }",
    ]


def sum_vectors(variant: Variant) -> list[tuple[int, int]]:
    """Return the row and the four columns of every vector of sums that a thread keeps."""
    return [(i, j) for i in range(variant.rows) for j in range(variant.columns // 4)]


def component_vector(names: list[str], component: int) -> str:
    """Return the vector of one component of four vectors."""
    return f"vec4<f32>({', '.join(f'{name}.{XYZW[component]}' for name in names)})"
