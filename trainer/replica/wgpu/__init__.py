"""Our own engine for GPUs with Vulkan: Qwen3, Qwen2 and Llama in WGSL, forward and backward.

Reading order: `device` (an adapter), `array` (device memory with a shape), `graph` (recorded
dispatches), `kernels/` (WGSL with its binders), `model` (a decoder recorded from them), `replica`.
"""
