"""One device for all tests of the engine: the first Vulkan adapter, software ones included."""

from __future__ import annotations

import pytest

from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter


@pytest.fixture(scope="session")
def device(vulkan: Adapter) -> Device:
    """Return an opened device; without any Vulkan the tests skip."""
    return Device(vulkan)


@pytest.fixture(scope="session")
def narrow(device: Device) -> Device:
    """Return a device whose kernel arguments span 64 KiB."""
    return Device(device.adapter, binding_limit=64 << 10)
