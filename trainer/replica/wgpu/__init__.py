"""Motley's engine for GPUs with Vulkan: Qwen3, Qwen2 and Llama in WGSL, forward and backward.

Reading order: `gpu/vulkan_adapter` (the GPUs), `gpu/device` (an opened one), `gpu/array` (device
memory with a shape), `gpu/graph` (recorded dispatches), `kernels/` (WGSL with its binders),
`layers/` (a decoder recorded from them), `replica`.
"""

import os

os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108  # Vulkan drivers warn without it
