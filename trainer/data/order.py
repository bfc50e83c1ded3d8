"""The order in which an epoch visits its samples, the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_STREAM = int.from_bytes(b"order", "little")  # separates these draws from the initial weights'


def permute_epoch(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return the permutation of `range(length)` that epoch `epoch` visits, `[length]`.

    Each sample draws one raw 64-bit word from Philox4x64-10 (Salmon et al., SC 2011) keyed by
    seed and epoch, and the samples are sorted by it, ties by position. Only the generator's
    specified integers are used: NumPy may change its `shuffle` between versions, not these.
    """
    assert min(seed, epoch, length) >= 0
    key = np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, _STREAM], dtype=np.uint64)
    draws = np.random.Philox(counter=counter, key=key).random_raw(length)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)
