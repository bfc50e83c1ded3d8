"""A device that has no room, or is lost, says so; and what crosses is counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import wgpu

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError, LostError, OutOfMemoryError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.kernels.norm import rms_norm

EMPTY = "@compute @workgroup_size(1) fn main() {}"


def test_a_buffer_that_no_device_has_room_for(device: Device) -> None:
    before = device.allocated
    with pytest.raises(OutOfMemoryError, match=r"^\S.*: .*maximum buffer size"):
        device.create_buffer(1 << 60)
    assert device.allocated == before
    array = device.create_array((3,))  # it works on
    device.write(array, np.ones(3, np.float32))
    np.testing.assert_array_equal(device.read(array), np.ones(3))


def test_transfers_and_submissions_are_counted(device: Device) -> None:
    array = device.create_array((8,))
    before = vars(device.counters).copy()
    device.write(array, np.ones(8, np.float32))
    device.clear([array])
    assert not device.read(array).any()
    changes = {name: count - before[name] for name, count in vars(device.counters).items()}
    assert changes == {"uploads": 1, "readbacks": 1, "submits": 1, "dispatches": 0}


def test_code_that_does_not_compile_is_told(device: Device) -> None:
    with pytest.raises(DeviceError):
        device.create_pipeline("fn main() { nonsense }")


def write(device: Device, array: Array) -> None:
    device.write(array, np.zeros(array.shape, np.float32))


def read(device: Device, array: Array) -> None:
    device.read(array)


def allocate(device: Device, array: Array) -> None:
    device.create_array(array.shape)


def clear(device: Device, array: Array) -> None:
    device.clear([array])


def compile_code(device: Device, _array: Array) -> None:
    device.create_pipeline(EMPTY)


def submit_nothing(device: Device, _array: Array) -> None:
    device.submit(device.create_encoder())


@pytest.fixture(scope="module")
def lost(vulkan: Adapter) -> tuple[Device, Array, Graph]:
    """A device that was lost after it had been used, with a graph that ran."""
    device = Device(vulkan)
    x, weight, y = (
        device.create_array((2, 64)),
        device.create_array((64,)),
        device.create_array((2, 64)),
    )
    graph = Graph(device)
    rms_norm(graph, x, weight, y, eps=1e-6)
    graph.run()
    device.read(y)
    device.handle.destroy()
    return device, x, graph


@pytest.mark.parametrize("use", [write, read, allocate, clear, compile_code, submit_nothing])
def test_a_lost_device_is_told_at_every_use(
    lost: tuple[Device, Array, Graph], use: Callable[[Device, Array], None]
) -> None:
    device, array, _ = lost
    with pytest.raises(LostError, match=device.adapter.name.split()[0]):
        use(device, array)


def test_a_graph_on_a_lost_device(lost: tuple[Device, Array, Graph]) -> None:
    with pytest.raises(LostError):
        lost[2].run()


def test_mapping_on_a_lost_device(lost: tuple[Device, Array, Graph]) -> None:
    device = lost[0]
    with pytest.raises(LostError):
        device.create_buffer(64, wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST)


def test_a_wait_for_a_lost_device_returns(device: Device) -> None:
    own = Device(device.adapter)
    own.mark_submitted()()
    wait_until_computed = own.mark_submitted()
    own.handle.destroy()
    wait_until_computed()  # the driver aborts the process on some calls to a lost device
    with pytest.raises(LostError):
        own.mark_submitted()
