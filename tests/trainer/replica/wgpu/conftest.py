"""One device for all tests of the engine: the first Vulkan adapter, software ones included."""

from __future__ import annotations

import pytest

from trainer.replica.wgpu.adapter import adapters
from trainer.replica.wgpu.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    """Return an opened device; without any Vulkan the tests skip."""
    found = adapters()
    if not found:
        pytest.skip("no Vulkan device (Debian: apt install mesa-vulkan-drivers)")
    return Device(found[0])
