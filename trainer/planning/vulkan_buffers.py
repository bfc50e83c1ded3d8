"""Sizes of buffers on a Vulkan device: what the wgpu engine takes by, and its plan counts by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["f32", "u32", "bf16", "nf4"]

ALIGNMENT = 256
"""Alignment of a window into a buffer, in bytes: the maximum that any device requires."""
NF4_BLOCK = 64
"""Elements that share one absmax, counted over the flattened tensor (bitsandbytes)."""
CHUNK_ROWS = 256
"""The most rows whose logits are computed together."""
LOGIT_BYTES = 32 << 20
"""The most bytes of logits at once."""
SCORE_BYTES = 64 << 20
"""Most bytes of one window of scores; two exist in backward."""
BINDING_BYTES = 128 << 20
"""Bytes that a kernel's argument may span where no device says otherwise."""
PARTIAL_SUMS = 128
"""Partial sums over rows that keep a large GPU busy; any number is correct."""
PLANNED_ENTRIES = 128
"""Planned classes a target: teachers keep about that many."""
PROMPT_CHUNKS = (128, 64, 32, 16)
"""Tokens of a prompt that are taken into the cache together, the most first."""
LOGIT_ROWS = 64
"""Rows of a teacher's logits begin at its multiples: their numbers are a kernel argument."""
_STEP = 16
"""Widths are rounded up to its multiples: fewer recordings, and whole vectors in every row."""
_WORDS = ALIGNMENT // 4


@dataclass(frozen=True)
class KVShape:
    """A layer's attention, whose keys and values are kept."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes of a layer's keys and values together, for `slots` tokens a sample."""
        return 2 * 4 * batch * self.num_kv_heads * count_slots(slots, 0) * self.head_dim


def tensor_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    """Return the bytes of a tensor, rounded up to whole 4-byte words."""
    bits = {"f32": 32, "u32": 32, "bf16": 16, "nf4": 4}[kind] * math.prod(shape)
    return -(-bits // 32) * 4


def align_size(size: int) -> int:
    """Return `size` bytes rounded up to a positive multiple of the alignment."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def padded_length(tokens: int) -> int:
    """Return the width of a micro-batch whose longest sample has that many tokens."""
    return -(-tokens // _STEP) * _STEP


def count_slots(longest: int, max_new_tokens: int) -> int:
    """Return the positions that a continued prompt takes: whole chunks, for their padding."""
    return -(-(longest + max_new_tokens) // PROMPT_CHUNKS[0]) * PROMPT_CHUNKS[0]


def padded_words(count: int) -> int:
    """Return words rounded up to where the next part of an upload may begin."""
    return -(-count // _WORDS) * _WORDS


def upload_regions(rows: int, targets: int, entries: int) -> dict[str, int]:
    """Return the words of every part of a micro-batch's upload, in order."""
    return {
        "ids": rows,
        "rows": targets,
        "classes": targets,
        "counts": targets,
        "taught": targets * entries,
        "weights": targets * entries,
        "shares": 2 if entries else 0,
        "unique": rows,
        "starts": rows + 1,
        "order": rows,
    }


def row_windows(rows: int, columns: int, kind: Kind, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a matrix's rows, each within the bytes that a kernel argument may span.

    A window begins at an aligned byte, also of the NF4 scales.
    """
    size = tensor_bytes((rows, columns), kind)
    if size <= limit:
        yield 0, rows
        return
    step = 1
    while not _is_aligned(step * columns, kind):
        step *= 2
    count = limit * rows // size // step * step
    assert count > 0, f"{(rows, columns)} cannot be bound in windows of {limit} bytes"
    for start in range(0, rows, count):
        yield start, min(rows, start + count)


def logit_window_bytes(rows: int, columns: int, kind: Kind, chunk: int, binding: int) -> int:
    """Return the bytes of a window of weights that exceeds neither a binding nor the logits."""
    return min(binding, LOGIT_BYTES // (4 * chunk) * tensor_bytes((rows, columns), kind) // rows)


def logit_rows(rows: int, classes: int, binding: int) -> int:
    """Return the rows whose logits of all classes are computed together for a teacher."""
    return min(rows, max(1, binding // (4 * classes) // LOGIT_ROWS) * LOGIT_ROWS)


def _is_aligned(elements: int, kind: Kind) -> bool:
    if kind == "nf4":
        return elements % (NF4_BLOCK * ALIGNMENT // 4) == 0
    return elements * (2 if kind == "bf16" else 4) % ALIGNMENT == 0
