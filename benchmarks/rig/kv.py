"""A layer's attention of one token, with keys and values on a Vulkan device or in main memory."""

from __future__ import annotations

import argparse

import torch

from rig.report import Ratio, Report, skip
from trainer.distill.teacher.kv_offload import step_seconds
from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.wgpu.generation.kv_store import KVStore
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter

_SHAPE = KVShape(32, 8, 128)
"""Of Qwen3-4B and Qwen3-8B."""
_SIZES = ((1, 1024), (1, 8192), (1, 32768), (4, 8192))
"""Rows, and tokens of each."""


def kv(report: Report, arguments: argparse.Namespace) -> None:
    """Seconds on the device over those of torch on the CPU, transfers included."""
    try:
        device = Device(select_adapter(arguments.gpu, allow_software=True))
    except DeviceError as error:
        skip(str(error))
    print(f"{device.adapter}, {device.adapter.driver}; torch on {torch.get_num_threads()} threads")
    store = KVStore(device, _SHAPE, [0])
    for rows, slots in _SIZES:
        store.begin(rows, slots)
        there = step_seconds(_SHAPE, rows, slots, torch.zeros(1), store)
        for dtype in (torch.float32, torch.bfloat16):
            here = step_seconds(_SHAPE, rows, slots, torch.zeros(1, dtype=dtype))
            name = f"{rows} x {slots} tokens, {1e3 * there:.2f} ms"
            report.add(
                Ratio(name, there / here, f"torch's {1e3 * here:.2f} ms in {dtype}"),
                adapter=device.adapter.key,
                device_seconds=there,
                torch_seconds=here,
            )
