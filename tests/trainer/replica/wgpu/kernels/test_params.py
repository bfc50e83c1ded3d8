"""Kernel parameters by name: what the code does not declare is refused, and the bytes are its."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.replica.wgpu import kernels
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Dispatch, Graph, parse_param_fields
from trainer.replica.wgpu.kernels.elementwise import fill
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.gemm.variants import ALL, Variant
from trainer.replica.wgpu.kernels.heads import split_heads
from trainer.replica.wgpu.kernels.softmax import causal_softmax
from trainer.replica.wgpu.kernels.source import read_kernel_source

RIGHT: dict[str, Any] = {"rows": 2, "width": 64, "eps": 1e-6}
DECLARED = sorted(
    file.stem
    for folder in kernels.__path__
    for file in Path(folder).glob("*.wgsl")
    if "var<uniform>" in file.read_text(encoding="utf-8")
)


def added(params: dict[str, Any], code: str | None = None) -> bytes:
    graph = Graph(None)
    graph.add(
        "rms_norm", read_kernel_source("rms_norm") if code is None else code, [], params, (1, 1, 1)
    )
    return graph.dispatches[0].params


def recorded(binder: Callable[..., None], *shapes: tuple[int, ...], **settings: Any) -> Dispatch:
    graph = Graph(None)
    binder(graph, *(Array(None, shape) for shape in shapes), **settings)
    (dispatch,) = graph.dispatches
    return dispatch


def read_by(code: str) -> set[str]:
    return set(re.findall(r"\bp\.(\w+)", code))


def test_a_missing_name_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"^rms_norm: no value for width$"):
        added({"rows": 2, "eps": 1e-6})


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"^rms_norm: no field length$"):
        added({**RIGHT, "length": 1})


def test_a_misspelt_name_is_both() -> None:
    with pytest.raises(AssertionError, match=r"^rms_norm: no value for eps, no field epsilon$"):
        added({"rows": 2, "width": 64, "epsilon": 1e-6})


def test_a_code_without_parameters_takes_none() -> None:
    assert added({}, read_kernel_source("grid")) == b""
    with pytest.raises(AssertionError, match="no field rows"):
        added({"rows": 2}, read_kernel_source("grid"))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("rows", 2.0, "u32"),
        ("rows", -1, "u32"),
        ("width", 1 << 32, "u32"),
        ("eps", 1e39, "f32"),
        ("eps", "1e-6", "f32"),
    ],
)
def test_a_value_that_its_type_does_not_hold_is_refused(name: str, value: Any, kind: str) -> None:
    message = re.escape(f"rms_norm: {name} is {value!r}, not {kind}")
    with pytest.raises(AssertionError, match=f"^{message}$"):
        added({**RIGHT, name: value})


def test_the_order_of_the_bytes_is_the_codes() -> None:
    assert added(dict(reversed(RIGHT.items()))) == struct.pack("<IIf", 2, 64, 1e-6)


def test_comments_line_breaks_and_a_last_comma() -> None:
    code = (
        "struct Params {\n  low: i32,  // not {high: u32}\n  high :u32 ,\n}\nstruct P { no: u32 }"
    )
    assert added({"high": 1, "low": -1}, code) == struct.pack("<iI", -1, 1)


@pytest.mark.parametrize("member", ["at: vec2<u32>", "@align(16) at: u32", "at: bool", "at"])
def test_a_member_of_another_layout_is_refused(member: str) -> None:
    with pytest.raises(AssertionError, match=r"struct Params: .*\bat\b"):
        added({"at": 1}, f"struct Params {{ {member} }}")


@pytest.mark.parametrize("name", DECLARED)
def test_a_file_declares_what_it_reads(name: str) -> None:
    assert (
        set(parse_param_fields(read_kernel_source(name)))
        == read_by(read_kernel_source(name))
        != set()
    )


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_a_product_declares_what_it_reads(variant: Variant) -> None:
    shapes = (5, 12), (12, 8), (5, 8)
    code = recorded(gemm, *shapes, m=5, n=8, k=12, variant=variant).code
    assert set(parse_param_fields(code)) == read_by(code) != set()


def test_a_product() -> None:
    dispatch = recorded(
        gemm,
        (99,),
        (99,),
        (99,),
        m=2,
        n=3,
        k=5,
        batch=2,
        alpha=0.5,
        accumulate=True,
        lda=6,
        ldb=7,
        ldc=8,
        strides=(21, 36, 17),
        offsets=(1, 4, 9),
    )
    expected = (2, 3, 5, 2, 6, 7, 8, 1, 21, 36, 17, 0.5, 1, 4, 9)
    assert dispatch.params == struct.pack("<11If3I", *expected)


def test_heads_softmax_and_one_value() -> None:
    heads = recorded(split_heads, (2 * 3, 4 * 8), (2, 4, 5, 8), eps=1e-5, cached=True)
    assert heads.params == struct.pack("<IIIIIf", 24, 4, 3, 8, 5, 1e-5)
    softmax = recorded(causal_softmax, (2, 6, 4), length=4, scale=0.5, first_row=3)
    assert softmax.params == struct.pack("<IIIIIf", 12, 6, 4, 3, 4, 0.5)
    assert recorded(fill, (7, 3), value=-2.5).params == struct.pack("<If", 21, -2.5)
