"""The C types that wgpu-py names are parsed once, together, and mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _cffi_backend
import cffi
import numpy as np
import pycparser
import pytest
from wgpu.backends import wgpu_native

from trainer.replica.wgpu.gpu.c_types import NAMES, find_types, parse_together
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter, list_adapters

POINTED = ("WGPUPair *", "WGPUPair * ", "WGPUHandle[]", "char []", "uint8_t *", "uintptr_t")
CALLED = "void(WGPUPair, WGPUHandle const *, void *)"
PRODUCT = """
override factor: u32;
struct Params { value: u32 }
@group(0) @binding(0) var<storage, read_write> product: array<u32>;
@group(0) @binding(1) var<uniform> params: Params;
@compute @workgroup_size(1) fn main() { product[0] = params.value * factor; }
"""


@pytest.fixture
def ffi() -> Any:
    made = cffi.FFI()
    made.cdef(
        "typedef struct WGPUPair { int32_t x; int32_t y; } WGPUPair;"
        "typedef struct WGPUHandleImpl* WGPUHandle;"
    )
    return made


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what cffi has its parser read from now on."""
    texts: list[str] = []
    parse = pycparser.CParser.parse

    def recorded(parser: pycparser.CParser, text: str, *rest: Any) -> Any:
        texts.append(text)
        return parse(parser, text, *rest)

    monkeypatch.setattr(pycparser.CParser, "parse", recorded)
    return texts


def test_a_type_is_the_one_that_cffi_parses_alone(ffi: Any) -> None:
    table = find_types(ffi, (*POINTED, CALLED))
    assert table == {
        **{name: ffi.typeof(name) for name in POINTED},
        CALLED: ffi.typeof(CALLED.replace("void(", "void(*)(")),
    }


def test_every_use_of_a_name_after_one_parse(ffi: Any, parsed: list[str]) -> None:
    parse_together(ffi, (*POINTED, CALLED))
    assert len(parsed) == 1
    pair = ffi.new("WGPUPair *", {"x": 3, "y": 4})
    seen: list[int] = []

    @ffi.callback(CALLED)
    def called(given: Any, _handle: Any, _data: Any) -> None:
        seen.append(given.x * given.y)

    called(pair[0], ffi.NULL, ffi.NULL)
    data = bytearray(b"ab")
    assert ffi.cast("uint8_t *", ffi.from_buffer("char []", data))[1] == data[1]
    assert ffi.from_buffer(data)[0] == b"a"  # no type is char[]
    assert len(ffi.new("WGPUHandle[]", 5)) == 5
    assert (seen, len(parsed)) == ([12], 1)


def test_a_name_that_is_unknown_is_left_to_cffi(ffi: Any, parsed: list[str]) -> None:
    parse_together(ffi, ("WGPUPair *", "WGPUGone *", "void(WGPUGone, void *)"))
    assert ffi.new("WGPUPair *").x == 0
    with pytest.raises(cffi.CDefError, match="WGPUGone"):
        ffi.new("WGPUGone *")
    assert ffi.new("WGPUPair[]", 2)[1].x == 0
    assert len(parsed) == 3


def test_a_compiled_ffi_stays_as_it_is() -> None:
    compiled = _cffi_backend.FFI()
    parse_together(compiled)
    assert compiled.new("uint8_t []", 3)[2] == 0


def test_the_engine_uses_the_listed_types_alone(
    vulkan: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def recording(first: Any, *rest: Any) -> Any:
            used.update([first] if isinstance(first, str) else [])
            return method(first, *rest)

        return recording

    ffi: Any = wgpu_native.ffi
    for name in ("new", "cast", "callback", "from_buffer", "typeof", "sizeof"):
        monkeypatch.setattr(ffi, name, recorded(getattr(ffi, name)))
    device = Device(list_adapters()[vulkan.index])
    product = device.create_array((64,), "u32")
    device.write(product, np.zeros(64, np.uint32))
    graph = Graph(device)
    graph.add("product", PRODUCT, [product], {"value": 6}, (1, 1, 1), {"factor": 7})
    graph.run()
    assert device.read(product)[0] == 42

    unused = set(NAMES) - used
    assert used <= set(NAMES)
    assert unused <= {"WGPUInstanceDescriptor *"}  # once a process
