"""The C types that wgpu-py names, parsed together.

wgpu-py gives cffi its types by name. cffi parses every new name in Python, after a declaration of
each type in wgpu's header: 13 ms for each of the names of a run, and no more for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def parse_together(ffi: Any, names: Sequence[str] = NAMES) -> None:
    """Give `ffi`, which keeps the type of each name that it has parsed, these names in one parse.

    An `ffi` that was compiled stays as it is: it parses in C.
    """
    with suppress(AttributeError):
        known = ffi._parsed_types
        known.update({name: (ctype, "(" in name) for name, ctype in find_types(ffi, names).items()})


def find_types(ffi: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the type of each name, of a function its pointer; without unknown ones."""
    declared = set(ffi.list_types()[0])
    known = [name for name in names if declared.issuperset(re.findall(r"\bWGPU\w+", name))]
    # As arguments of one function: an array would become a pointer there, so its address is passed.
    arguments = ", ".join(name.replace("[]", "(*)[]") for name in known)
    found = ffi.typeof(f"void(*)({arguments})").args
    return {
        name: ctype.item if name.endswith("[]") else ctype
        for name, ctype in zip(known, found, strict=True)
    }
