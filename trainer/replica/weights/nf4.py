"""NormalFloat, 4 bits (QLoRA, Dettmers et al., arXiv 2305.14314), the same bytes as bitsandbytes.

64 consecutive elements of the flattened tensor share an absmax; each element is the index of the
nearest of 16 values, relative to it. In a byte the first element has the high nibble.
"""

from __future__ import annotations

import numpy as np

from trainer.planning.vulkan_buffers import NF4_BLOCK

# fmt: off
VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)
# fmt: on
"""The quantiles of a normal distribution, from the paper's appendix E."""

_MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2
_SMALLEST = np.float32(1e-38)  # bitsandbytes' divisor for a block of zeros


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, u8 `[ceil(n / 2)]`, and absmax, fp32 `[ceil(n / 64)]`, of fp32 `[n]`.

    A tensor may be quantised in consecutive pieces of whole blocks. The arithmetic is that of
    bitsandbytes 0.50 on a CPU: whole blocks are multiplied by 1 / absmax, a last incomplete one is
    divided by it.
    """
    assert values.dtype == np.float32, values.dtype
    assert values.ndim == 1, values.shape
    whole = values.size // NF4_BLOCK * NF4_BLOCK
    blocks, rest = values[:whole].reshape(-1, NF4_BLOCK), values[whole:]
    absmax = np.abs(blocks).max(axis=1)
    relative = np.zeros(values.size + values.size % 2, np.float32)
    inverse = np.float32(1.0) / np.maximum(absmax, _SMALLEST)
    np.multiply(blocks, inverse[:, None], out=relative[:whole].reshape(-1, NF4_BLOCK))
    if rest.size:
        last = np.maximum(np.abs(rest).max(keepdims=True), _SMALLEST)
        absmax = np.concatenate([absmax, last])
        relative[whole : values.size] = rest / last
    codes = np.zeros(relative.size, np.uint8)
    for midpoint in _MIDPOINTS:  # 15 passes of comparisons beat a search for each element
        codes += relative > midpoint
    return codes[::2] << 4 | codes[1::2], absmax


def dequantize(codes: np.ndarray, absmax: np.ndarray, size: int) -> np.ndarray:
    """Return fp32 `[size]` from the results of `quantize`."""
    values = VALUES[np.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[:size]]
    return values * np.repeat(absmax, NF4_BLOCK)[:size]
