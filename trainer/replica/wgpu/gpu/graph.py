"""Dispatches that are recorded once and encoded at every step.

Recording makes pipelines, bind groups and parameters, which is slow (50 us a bind group); encoding
walks a list of handles through wgpu-native itself, which is fast (1 us a dispatch against 4 us
through wgpu-py, measured with 3,900 dispatches).
"""

from __future__ import annotations

import re
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import wgpu
from wgpu.backends import wgpu_native

from trainer.planning.vulkan_buffers import ALIGNMENT, BINDING_BYTES
from trainer.replica.wgpu.gpu.array import Array

if TYPE_CHECKING:
    from trainer.replica.wgpu.gpu.device import Device

Grid = tuple[int, int, int]
_native: Any = wgpu_native
_LARGEST = 65535  # workgroups along one axis, on every device


def spread_workgroups(groups: int) -> Grid:
    """Return a grid of at least `groups` workgroups; `group_index` in grid.wgsl numbers them."""
    columns = min(groups, _LARGEST)
    return columns, -(-groups // columns), 1


@dataclass(frozen=True)
class Dispatch:
    """One kernel on its arrays."""

    code: str
    constants: tuple[tuple[str, float], ...]
    arrays: tuple[Array, ...]
    params: bytes
    grid: Grid
    label: str


class Graph:
    """A list of dispatches in segments, which can run separately.

    Args:
        device: where it runs; None plans only.
        binding_limit: bytes that one array may span, without a device.
    """

    def __init__(self, device: Device | None, binding_limit: int = BINDING_BYTES) -> None:
        self.device = device
        self.binding_limit = device.binding_limit if device is not None else binding_limit
        self.dispatches: list[Dispatch] = []
        self._starts: dict[str, int] = {}
        self._encoded: list[tuple[Any, Any, int, int, int]] | None = None
        self._alive: list[object] = []  # owners of the raw handles below

    def add(
        self,
        label: str,
        code: str,
        arrays: Sequence[Array],
        params: Mapping[str, float],
        grid: Grid,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        """Record one dispatch.

        Arrays are bound in order from binding 0, then a uniform with `params`, a value for each
        field of the code's `struct Params`. `constants` set the code's overrides.
        """
        assert self._encoded is None, "a frozen graph cannot grow"
        assert max(grid) <= _LARGEST, f"{label}: grid {grid}"
        for array in arrays:
            assert array.nbytes <= self.binding_limit, f"{label}: {array.nbytes} bytes"
        settings = tuple(sorted((constants or {}).items()))
        packed = pack_params(label, code, params)
        self.dispatches.append(Dispatch(code, settings, tuple(arrays), packed, grid, label))

    def begin_segment(self, name: str) -> None:
        """Begin a named part; it ends at the next one."""
        assert name not in self._starts, f"segment {name} is there already"
        self._starts[name] = len(self.dispatches)

    @property
    def segments(self) -> list[str]:
        """Names in order."""
        return list(self._starts)

    def find_segment(self, name: str) -> tuple[int, int]:
        """Return the first dispatch of a segment, and the one after its last."""
        names = self.segments
        following = names[names.index(name) + 1 :]
        stop = self._starts[following[0]] if following else len(self.dispatches)
        return self._starts[name], stop

    def encode(self, encoder: Any, first: int = 0, last: int = -1) -> None:
        """Add dispatches `first` to `last` (exclusive; -1 for all) to a command encoder."""
        assert self.device is not None, "a plan cannot run"
        if self._encoded is None:
            self._encoded = self._create_bind_groups(self.device)
        chosen = self._encoded[first:] if last < 0 else self._encoded[first:last]
        compute = encoder.begin_compute_pass()
        handle = compute._internal
        lib, null = _native.lib, _native.ffi.NULL
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        current: Any = None
        for pipeline, group, x, y, z in chosen:
            if pipeline is not current:
                set_pipeline(handle, pipeline)
                current = pipeline
            set_bind_group(handle, 0, group, 0, null)
            dispatch(handle, x, y, z)
        compute.end()
        self.device.counters.dispatches += len(chosen)

    def run(self, first: int = 0, last: int = -1) -> None:
        """Encode and submit a part alone; see `encode`."""
        assert self.device is not None, "a plan cannot run"
        encoder = self.device.create_encoder()
        self.encode(encoder, first, last)
        self.device.submit(encoder)

    def _create_bind_groups(self, device: Device) -> list[tuple[Any, Any, int, int, int]]:
        """Make all pipelines and bind groups; all parameters are in one uniform buffer."""
        places: dict[bytes, int] = {}
        for item in self.dispatches:
            places.setdefault(item.params, len(places) * ALIGNMENT)
            assert len(item.params) <= ALIGNMENT, item.label
        usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
        uniform = device.create_buffer(max(1, len(places)) * ALIGNMENT, usage)
        packed = b"".join(params.ljust(ALIGNMENT, b"\0") for params in places)
        if packed:
            device.handle.queue.write_buffer(uniform, 0, packed)
        frozen: list[tuple[Any, Any, int, int, int]] = []
        for item in self.dispatches:
            pipeline = device.create_pipeline(item.code, dict(item.constants))
            entries: list[dict[str, Any]] = [
                {
                    "binding": number,
                    "resource": {"buffer": a.buffer, "offset": a.offset, "size": a.nbytes},
                }
                for number, a in enumerate(item.arrays)
            ]
            if item.params:
                # A uniform struct is as large as its members, rounded up to 16 bytes.
                window: dict[str, Any] = {"buffer": uniform, "offset": places[item.params]}
                window["size"] = -(-len(item.params) // 16) * 16
                entries.append({"binding": len(entries), "resource": window})
            group = device.handle.create_bind_group(
                layout=pipeline.get_bind_group_layout(0), entries=entries
            )
            self._alive += [pipeline, group]
            frozen.append((pipeline._internal, group._internal, *item.grid))
        # Freed with this graph, and not at the end of the process.
        weakref.finalize(self, device.release, uniform).atexit = False
        return frozen


_PACKERS = {
    "u32": struct.Struct("<I").pack,
    "i32": struct.Struct("<i").pack,
    "f32": struct.Struct("<f").pack,
}
"""By type; all are 4 bytes, so that fields follow each other without gaps."""
_COMMENT = re.compile(r"//.*")
_STRUCT = re.compile(r"\bstruct\s+Params\s*\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+)")


@cache
def parse_param_fields(code: str) -> Mapping[str, str]:
    """Return name and type of each field in order; none if a code has no `struct Params`."""
    found = _STRUCT.search(_COMMENT.sub("", code))
    members = found.group(1).split(",") if found else []
    types: dict[str, str] = {}
    for member in filter(None, map(str.strip, members)):  # the last comma is followed by none
        field = _FIELD.fullmatch(member)
        assert field is not None, f"struct Params: {member!r} is not a name and a type"
        name, kind = field.groups()
        assert kind in _PACKERS, f"struct Params: {name} is {kind}, not {', '.join(_PACKERS)}"
        types[name] = kind
    return types


def pack_params(kernel: str, code: str, values: Mapping[str, float]) -> bytes:
    """Return the bytes of `struct Params`; every field has a value, every value a field.

    A bool is 0 or 1. `kernel` is its name in messages.
    """
    types = parse_param_fields(code)
    wrong = [f"no value for {name}" for name in types if name not in values]
    wrong += [f"no field {name}" for name in values if name not in types]
    assert not wrong, f"{kernel}: {', '.join(wrong)}"
    packed = b""
    for name, kind in types.items():
        try:
            packed += _PACKERS[kind](values[name])
        except (struct.error, OverflowError) as error:
            raise AssertionError(f"{kernel}: {name} is {values[name]!r}, not {kind}") from error
    return packed
