"""The C types that wgpu-py names, parsed together.

wgpu-py gives cffi its types by name. cffi parses every new name in Python, after a declaration of
each type in wgpu's header: 13 ms for each of the names of a run, and no more for all of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

NAMES = (
    "WGPUAdapterInfo *",
    "WGPUAdapter[]",
    "WGPUBindGroupDescriptor *",
    "WGPUBindGroupEntry *",
    "WGPUBindGroupEntry[]",
    "WGPUBufferDescriptor *",
    "WGPUBufferMapCallbackInfo *",
    "WGPUChainedStruct *",
    "WGPUChainedStruct * ",
    "WGPUCommandBufferDescriptor *",
    "WGPUCommandBuffer[]",
    "WGPUCommandEncoderDescriptor *",
    "WGPUComputePassDescriptor *",
    "WGPUComputePipelineDescriptor *",
    "WGPUComputeState *",
    "WGPUConstantEntry *",
    "WGPUConstantEntry[]",
    "WGPUDeviceDescriptor *",
    "WGPUDeviceExtras *",
    "WGPUDeviceLostCallbackInfo *",
    "WGPUFeatureName[]",
    "WGPUInstanceDescriptor *",
    "WGPULimits *",
    "WGPUNativeLimits *",
    "WGPUQueueDescriptor *",
    "WGPURequestDeviceCallbackInfo *",
    "WGPUShaderModuleDescriptor *",
    "WGPUShaderSourceWGSL *",
    "WGPUStringView *",
    "WGPUUncapturedErrorCallbackInfo *",
    "char []",
    "intptr_t",
    "uint8_t *",
    "uint8_t []",
    "uintptr_t",
    "void(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void *, void *)",
    "void(WGPUDevice const *, WGPUErrorType, WGPUStringView, void *, void *)",
    "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)",
    "void(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void *, void *)",
)
"""Those of our engine's calls, as wgpu-py spells them; another one is parsed when it is used."""
_METHODS = ("new", "cast", "callback", "from_buffer")
"""They take a type or its name first."""


def parse_together(ffi: Any, names: Sequence[str] = NAMES) -> None:
    """Have the methods of `ffi` look up these names in a table, which one parse makes.

    An `ffi` that was compiled stays as it is: it parses in C.
    """
    table = types(ffi, names)
    with suppress(AttributeError):
        for method in _METHODS:
            setattr(ffi, method, _looking_up(table, getattr(ffi, method)))


def types(ffi: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what each name means to the methods of `ffi`, without those of unknown types."""
    declared = set(ffi.list_types()[0])
    known = [name for name in names if declared.issuperset(re.findall(r"\bWGPU\w+", name))]
    # As arguments of one function: an array would become a pointer there, so its address is passed.
    arguments = ", ".join(name.replace("[]", "(*)[]") for name in known)
    found = ffi.typeof(f"void(*)({arguments})").args
    return {
        name: ctype.item if name.endswith("[]") else ctype
        for name, ctype in zip(known, found, strict=True)
    }


def _looking_up(table: dict[str, Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def with_type(first: Any, *rest: Any, **named: Any) -> Any:
        ctype = table.get(first, first) if isinstance(first, str) else first
        return method(ctype, *rest, **named)

    return with_type
