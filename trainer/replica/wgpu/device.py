"""One GPU through Vulkan: adapters, an opened device, its pipelines, and counted transfers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108  # Vulkan drivers complain without
import wgpu
from wgpu.backends import wgpu_native

from trainer.replica.wgpu.array import Array, Kind, aligned, nbytes

LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
    "max-compute-workgroup-storage-size",
    "max-storage-buffers-per-shader-stage",
)
"""Asked for in full: what is not asked for is WebGPU's least, such as 128 MiB a binding."""


class DeviceError(Exception):
    """The device cannot be opened, ran out of memory or was lost; the message says which."""


@dataclass(frozen=True)
class Adapter:
    """A Vulkan device of this machine."""

    index: int
    name: str
    driver: str
    """Name and version of the driver, as it gives them."""
    software: bool
    """Computed by the CPU, such as Mesa's llvmpipe."""
    handle: Any = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """What a cache of tuned variants is valid for."""
        return f"{self.name} | {self.driver} | wgpu-native {wgpu_native.__version__}"


@dataclass
class Counters:
    """What crossed between host and device, and what was started there."""

    uploads: int = 0
    readbacks: int = 0
    submits: int = 0
    dispatches: int = 0


def adapters() -> list[Adapter]:
    """Return the Vulkan devices of this machine, hardware first."""
    found = [
        adapter
        for adapter in wgpu.gpu.enumerate_adapters_sync()
        if adapter.info["backend_type"] == "Vulkan"
    ]
    listed = [
        Adapter(
            index=index,
            name=adapter.info["device"],
            driver=adapter.info["description"],
            software=adapter.info["adapter_type"] == "CPU",
            handle=adapter,
        )
        for index, adapter in enumerate(found)
    ]
    return sorted(listed, key=lambda adapter: (adapter.software, adapter.index))


class Device:
    """An opened device.

    Raises:
        DeviceError: the driver refuses.
    """

    def __init__(self, adapter: Adapter, *, binding_limit: int | None = None) -> None:
        limits = {name: adapter.handle.limits[name] for name in LIMITS}
        if binding_limit is not None:
            limits["max-storage-buffer-binding-size"] = binding_limit
        try:
            self.handle: Any = adapter.handle.request_device_sync(required_limits=limits)
        except (wgpu.GPUError, RuntimeError) as error:
            raise DeviceError(f"{adapter.name}: {str(error).splitlines()[0]}") from None
        self.adapter = adapter
        self.counters = Counters()
        self.binding_limit: int = limits["max-storage-buffer-binding-size"]
        """Bytes that one kernel argument may span; larger arrays are bound in windows."""
        self.allocated = 0
        """Bytes of all buffers now."""
        self._pipelines: dict[tuple[str, tuple[tuple[str, float], ...]], Any] = {}

    def array(self, shape: tuple[int, ...], kind: Kind = "f32") -> Array:
        """Return new memory, zeroed.

        Raises:
            DeviceError: it does not fit.
        """
        scales = self.array((-(-int(np.prod(shape)) // 64),)) if kind == "nf4" else None
        return Array(self.buffer(nbytes(shape, kind)), shape, kind, scales=scales)

    def buffer(self, size: int, usage: int | None = None) -> wgpu.GPUBuffer:
        """Return a new buffer of at least `size` bytes, zeroed; storage unless said otherwise."""
        storage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        size = aligned(size)
        try:
            buffer = self.handle.create_buffer(size=size, usage=usage or storage)
        except wgpu.GPUError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise DeviceError(f"{self.adapter.name}: {reason}") from None
        self.allocated += size
        return buffer

    def release(self, buffer: wgpu.GPUBuffer) -> None:
        """Give a buffer's memory back."""
        self.allocated -= buffer.size
        buffer.destroy()

    def pipeline(self, code: str, constants: Mapping[str, float] | None = None) -> Any:
        """Return the compiled entry point `main`; equal code and constants compile once.

        `constants` are values of the code's `override` declarations.
        """
        key = code, tuple(sorted((constants or {}).items()))
        if key not in self._pipelines:
            module = self.handle.create_shader_module(code=code)
            stage: Any = {"module": module, "entry_point": "main", "constants": dict(key[1])}
            self._pipelines[key] = self.handle.create_compute_pipeline(layout="auto", compute=stage)
        return self._pipelines[key]

    def write(self, array: Array, values: np.ndarray) -> None:
        """Copy raw values, already in the array's kind, to the device; one upload."""
        data = np.ascontiguousarray(values)
        assert data.nbytes == array.nbytes, f"{data.nbytes} bytes for {array.nbytes}"
        self.counters.uploads += 1
        assert array.buffer is not None, "a plan cannot be written to"
        self.handle.queue.write_buffer(array.buffer, array.offset, data)

    def read(self, array: Array) -> np.ndarray:
        """Return a copy of an array on the host: f32, or u32 for every other kind; one readback."""
        self.counters.readbacks += 1
        assert array.buffer is not None, "a plan cannot be read"
        data: Any = self.handle.queue.read_buffer(array.buffer, array.offset, array.nbytes)
        if array.kind == "f32":
            return np.frombuffer(data, np.float32).reshape(array.shape)
        return np.frombuffer(data, np.uint32)

    def clear(self, arrays: Sequence[Array]) -> None:
        """Fill arrays with zeros."""
        encoder = self.handle.create_command_encoder()
        for array in arrays:
            encoder.clear_buffer(array.buffer, array.offset, array.nbytes)
        self.submit([encoder.finish()])

    def submit(self, commands: Sequence[wgpu.GPUCommandBuffer]) -> None:
        """Start what was encoded."""
        self.counters.submits += 1
        self.handle.queue.submit(list(commands))
