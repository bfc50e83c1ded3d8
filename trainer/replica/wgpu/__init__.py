"""Our own engine for GPUs with Vulkan: Qwen3, Qwen2 and Llama in WGSL, forward and backward.

Reading order: `adapter` (which GPU), `device` (one opened), `array` (device memory with a shape),
`graph` (recorded dispatches), `kernels/` (WGSL with its binders), `model` (a decoder recorded from
them), `replica`.
"""

import os

os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108  # Vulkan drivers complain without
