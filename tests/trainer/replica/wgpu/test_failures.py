"""A device that runs out of memory or is lost under a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica.driving import gradient, relative
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import LostError, OutOfMemoryError
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny


class SmallDevice(Device):
    """A device that has room for `room` more bytes; software ones have all of the machine's."""

    room = 1 << 40

    def create_buffer(self, size: int, usage: int | None = None) -> Any:
        if size > self.room:
            raise OutOfMemoryError("small: not enough memory left")
        self.room -= size
        return super().create_buffer(size, usage)

    def release(self, buffer: Any) -> None:
        self.room += buffer.size
        super().release(buffer)


@pytest.fixture
def adapter(device: Device) -> Adapter:
    return device.adapter


def test_micro_batches_halve_when_memory_ends(adapter: Adapter, tiny: Tiny) -> None:
    batch, small = tiny.batch(8), SmallDevice(adapter)
    replica, _ = tiny.wgpu(small, training__micro_batch_size="auto")
    expected = gradient(replica, batch)[0]
    assert replica.limit.samples >= 8

    replica._engine.free_memory()
    small.room = 700_000
    assert relative(gradient(replica, batch)[0], expected) < 1e-6
    assert 1 <= replica.limit.samples < 8

    replica._engine.free_memory()
    small.room = 10_000
    with pytest.raises(InputError, match=r"one sample of .* tokens does not fit: lower"):
        gradient(replica, batch)
    assert replica.limit == MicroBatchLimit(1, replica.limit.tokens)


def test_groups_halve_before_micro_batches_when_memory_ends(adapter: Adapter, tiny: Tiny) -> None:
    batch, small = tiny.batch(8), SmallDevice(adapter)
    folder = tiny.model(num_hidden_layers=8)
    replica, _ = tiny.wgpu(small, folder, model__resident=0, training__micro_batch_size=1)
    expected, _, _ = gradient(replica, batch)
    limit, memory = replica.limit, replica._engine._waiting
    assert memory is not None
    taken = memory.pool.report_budget().total
    replica._engine.free_memory()
    before = small.room = taken * 2 // 3 + 600_000
    assert (gradient(replica, batch)[0] == expected).all(), "in any order the same bits"
    assert before - small.room >= memory.pool.report_budget().total
    assert memory.pool.report_budget().total < taken * 2 // 3
    assert replica.limit == limit
    assert replica.group_tokens < 8 * 48


def test_a_lost_device_ends_the_step_with_its_name(adapter: Adapter, tiny: Tiny) -> None:
    """The worker ends with an exit code that a supervisor restarts, and asks again what works."""
    lost = Device(adapter)
    replica, _ = tiny.wgpu(lost)
    gradient(replica, tiny.batch(3))
    lost.handle.destroy()
    with pytest.raises(LostError, match=adapter.name.split()[0]) as error:
        gradient(replica, tiny.batch(3))
    assert error.value.exit_code == 7
