"""A device that runs out of memory or is lost under a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica import driving
from tests.trainer.replica.driving import gradient, relative
from trainer.model.layout import build_layout
from trainer.replica.microbatch import Limit
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import LostError, OutOfMemoryError
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.replica import WgpuReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.replica.conftest import MakeBatch


class SmallDevice(Device):
    """A device that has room for `room` more bytes; software ones have all of the machine's."""

    room = 1 << 40

    def buffer(self, size: int, usage: int | None = None) -> Any:
        if size > self.room:
            raise OutOfMemoryError("small: not enough memory left")
        self.room -= size
        return super().buffer(size, usage)

    def release(self, buffer: Any) -> None:
        self.room += buffer.size
        super().release(buffer)


@pytest.fixture
def adapter(device: Device) -> Adapter:
    return device.adapter


def test_micro_batches_halve_when_memory_ends(
    adapter: Adapter, tiny_model: TinyModel, make_config: MakeConfig, make_batch: MakeBatch
) -> None:
    folder = tiny_model()
    config = make_config(folder, training__micro_batch_size="auto")
    layout = build_layout(folder, config)
    weights = driving.drawn_weights(folder, config)
    batch = make_batch(8)
    small = SmallDevice(adapter)
    replica = WgpuReplica(folder, config, layout, small)
    replica.write_trainable(weights)
    expected = gradient(replica, batch)[0]
    assert replica.limit.samples >= 8

    replica._engine.forget()
    small.room = 700_000
    assert relative(gradient(replica, batch)[0], expected) < 1e-6
    assert 1 <= replica.limit.samples < 8

    replica._engine.forget()
    small.room = 10_000
    with pytest.raises(InputError, match=r"one sample of .* tokens does not fit: lower"):
        gradient(replica, batch)
    assert replica.limit == Limit(1, replica.limit.tokens)


def test_a_lost_device_ends_the_step_with_its_name(
    adapter: Adapter, tiny_model: TinyModel, make_config: MakeConfig, make_batch: MakeBatch
) -> None:
    """The worker ends with an exit code that a supervisor restarts, and asks again what works."""
    folder = tiny_model()
    config = make_config(folder)
    weights = driving.drawn_weights(folder, config)
    lost = Device(adapter)
    replica = WgpuReplica(folder, config, build_layout(folder, config), lost)
    replica.write_trainable(weights)
    gradient(replica, make_batch(3))
    lost.handle.destroy()
    with pytest.raises(LostError, match=adapter.name.split()[0]) as error:
        gradient(replica, make_batch(3))
    assert error.value.exit_code == 7
