"""WGSL of a matrix product, written for a variant and the layout of its operands.

Everything that changes between calls (sizes, pitches, strides, offsets, alpha) is read from the
uniform parameters, so that few pipelines serve a whole model. The code contains what the compiler
must know: the unrolled register tile, and the layout of operands in memory.
"""

from __future__ import annotations

from functools import cache

from trainer.replica.wgpu.kernels.gemm.direct import direct
from trainer.replica.wgpu.kernels.gemm.parts import OperandLayout
from trainer.replica.wgpu.kernels.gemm.tiled import tiled
from trainer.replica.wgpu.kernels.gemm.variants import Variant
from trainer.replica.wgpu.kernels.source import source


@cache
def gemm_code(variant: Variant, layout: OperandLayout) -> str:
    """Return the code of one kernel; its bindings are a, b, (scales of b,) c, parameters."""
    body = tiled(variant, layout) if variant.kind == "tiled" else direct(variant, layout)
    parts = ["gemm_params", *_operand_parts(layout), "grid"]
    if layout.kind_b == "nf4":
        parts.append("nf4_table" if variant.kind == "tiled" else "nf4_chosen")
    pieces = [source(part).strip() for part in parts]
    return "\n".join([*pieces, *_bindings(layout), *body, "}", ""])


def _operand_parts(layout: OperandLayout) -> list[str]:
    """Return the files with the functions that read a and b and write c."""
    width = {True: "wide", False: "narrow"}
    return [
        f"gemm_a_{width[layout.wide_a]}",
        f"gemm_b_{layout.kind_b}_{width[layout.wide_b]}",
        f"gemm_c_{width[layout.wide_c]}",
    ]


def _bindings(layout: OperandLayout) -> list[str]:
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
