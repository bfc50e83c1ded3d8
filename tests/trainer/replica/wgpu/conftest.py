"""One device for all tests of the engine: the first Vulkan adapter, software ones included."""

from __future__ import annotations

import pytest

from trainer.replica.wgpu.adapter import Adapter
from trainer.replica.wgpu.device import Device


@pytest.fixture(scope="session")
def device(vulkan: Adapter) -> Device:
    """Return an opened device; without any Vulkan the tests skip."""
    return Device(vulkan)
