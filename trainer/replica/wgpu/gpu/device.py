"""One GPU through Vulkan: its memory, its pipelines, and counted transfers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import wgpu
from wgpu.backends import wgpu_native

from trainer.planning.vulkan_buffers import Kind, align_size, tensor_bytes
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.errors import DeviceError, LostError, OutOfMemoryError
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.system.process.slow_log import log_if_slow

_native: Any = wgpu_native
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
    "max-compute-workgroup-storage-size",
    "max-storage-buffers-per-shader-stage",
)
"""Requested in full: others are WebGPU's minimum, such as 128 MiB a binding."""


@dataclass
class Counters:
    """Transfers between host and device, submissions and dispatches."""

    uploads: int = 0
    readbacks: int = 0
    submits: int = 0
    dispatches: int = 0


_KINDS: tuple[tuple[str, type[DeviceError]], ...] = (
    ("Not enough memory", OutOfMemoryError),
    ("maximum buffer size", OutOfMemoryError),
    ("device is lost", LostError),
)
"""wgpu-py has types for these, but raises validation errors; the texts are wgpu's own."""


_NUMBERS = itertools.count(1)
_map_states: dict[int, int] = {}
"""Results of `map_submitted`, by the number of each."""


@_native.ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")
def _put_state(state: int, _message: Any, number: Any, _other: Any) -> None:
    _map_states[int(_native.ffi.cast("uintptr_t", number))] = state


class Device:
    """An opened device.

    Raises:
        DeviceError: the driver fails to open it.
    """

    def __init__(self, adapter: Adapter, *, binding_limit: int | None = None) -> None:
        limits = {name: adapter.handle.limits[name] for name in LIMITS}
        if binding_limit is not None:
            limits["max-storage-buffer-binding-size"] = binding_limit
        self.adapter = adapter
        with self.raise_device_errors():
            self.handle: Any = adapter.handle.request_device_sync(required_limits=limits)
        self.counters = Counters()
        self.binding_limit: int = limits["max-storage-buffer-binding-size"]
        """Bytes that one kernel argument may span; larger arrays are bound in windows."""
        self.allocated = 0
        """Bytes of all buffers now."""
        self._pipelines: dict[tuple[str, tuple[tuple[str, float], ...]], Any] = {}

    def create_array(self, shape: tuple[int, ...], kind: Kind = "f32") -> Array:
        """Return new memory, zeroed.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        scales = self.create_array((-(-int(np.prod(shape)) // 64),)) if kind == "nf4" else None
        return Array(self.create_buffer(tensor_bytes(shape, kind)), shape, kind, scales=scales)

    def create_buffer(self, size: int, usage: int | None = None) -> wgpu.GPUBuffer:
        """Return a new buffer of at least `size` bytes, zeroed; storage unless said otherwise.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        storage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        size = align_size(size)
        with self.raise_device_errors():
            buffer = self.handle.create_buffer(size=size, usage=usage or storage)
        self.allocated += size
        return buffer

    def release(self, buffer: wgpu.GPUBuffer) -> None:
        """Free a buffer."""
        self.allocated -= buffer.size
        buffer.destroy()

    def create_pipeline(self, code: str, constants: Mapping[str, float] | None = None) -> Any:
        """Return the compiled entry point `main`; equal code and constants compile once.

        `constants` are values of the code's `override` declarations.
        """
        key = code, tuple(sorted((constants or {}).items()))
        if key not in self._pipelines:
            with log_if_slow("compiling a kernel"), self.raise_device_errors():
                module = self.handle.create_shader_module(code=code)
                stage: Any = {"module": module, "entry_point": "main", "constants": dict(key[1])}
                made = self.handle.create_compute_pipeline(layout="auto", compute=stage)
            self._pipelines[key] = made
        return self._pipelines[key]

    def write(self, array: Array, values: np.ndarray) -> None:
        """Copy raw values, already in the array's kind, to the device; one upload."""
        data = np.ascontiguousarray(values)
        assert data.nbytes == array.nbytes, f"{data.nbytes} bytes for {array.nbytes}"
        self.counters.uploads += 1
        assert array.buffer is not None, "a plan cannot be written to"
        with self.raise_device_errors():
            self.handle.queue.write_buffer(array.buffer, array.offset, data)

    def read(self, array: Array) -> np.ndarray:
        """Return a copy of an array on the host: f32, or u32 for every other kind; one readback."""
        self.counters.readbacks += 1
        assert array.buffer is not None, "a plan cannot be read"
        with self.raise_device_errors():
            data: Any = self.handle.queue.read_buffer(array.buffer, array.offset, array.nbytes)
        if array.kind == "f32":
            return np.frombuffer(data, np.float32).reshape(array.shape)
        return np.frombuffer(data, np.uint32)

    def clear(self, arrays: Sequence[Array]) -> None:
        """Fill arrays with zeros."""
        encoder = self.create_encoder()
        for array in arrays:
            encoder.clear_buffer(array.buffer, array.offset, array.nbytes)
        self.submit(encoder)

    def create_encoder(self) -> Any:
        """Return a new command encoder, for `submit`."""
        return self.handle.create_command_encoder()

    def submit(self, encoder: Any) -> None:
        """Start the encoded work, after all earlier writes."""
        self.counters.submits += 1
        with self.raise_device_errors():
            # A lost device is reported here; submitting to it would abort the process.
            commands = encoder.finish()
            self.handle.queue.submit([commands])

    def map_submitted(self, buffer: wgpu.GPUBuffer) -> Callable[[], memoryview]:
        """Begin to map a buffer; return what waits until what was submitted has been computed.

        It returns the buffer's bytes, until `unmap_buffer`. wgpu-py's own call waits for what is
        submitted later, too.
        """
        lib, ffi = _native.lib, _native.ffi
        wait, number = self.mark_submitted(), next(_NUMBERS)
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, _put_state
        info.userdata1 = ffi.cast("void *", number)
        handle, size = cast("Any", buffer)._internal, buffer.size
        lib.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, size, info[0])

        def wait_until_mapped() -> memoryview:
            wait()
            if _map_states.pop(number, None) != lib.WGPUMapAsyncStatus_Success:
                raise DeviceError(f"{self.adapter.name}: cannot map a buffer")
            pointer = lib.wgpuBufferGetConstMappedRange(handle, 0, size)
            return memoryview(ffi.buffer(pointer, size))

        return wait_until_mapped

    def unmap_buffer(self, buffer: wgpu.GPUBuffer) -> None:
        """End what `map_submitted` began."""
        _native.lib.wgpuBufferUnmap(cast("Any", buffer)._internal)

    def mark_submitted(self) -> Callable[[], None]:
        """Return what waits until all that was submitted before this call has been computed.

        wgpu-py's own call for it is broken (0.32): its callback lacks an argument.
        """
        lib, ffi = _native.lib, _native.ffi
        with self.raise_device_errors():
            self.create_encoder().finish()  # reports a lost device, see `submit`
            number = lib.wgpuQueueSubmitForIndex(self.handle.queue._internal, 0, ffi.NULL)

        def wait_until_computed() -> None:
            with self.raise_device_errors():
                submission = ffi.new("WGPUSubmissionIndex *", number)
                lib.wgpuDevicePoll(self.handle._internal, True, submission)

        return wait_until_computed

    @contextmanager
    def raise_device_errors(self) -> Iterator[None]:
        """Raise wgpu's errors in the block as the matching DeviceError."""
        try:
            yield
        except (wgpu.GPUError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            kind = next((kind for text, kind in _KINDS if text in reason), DeviceError)
            raise kind(f"{self.adapter.name}: {reason}") from None
