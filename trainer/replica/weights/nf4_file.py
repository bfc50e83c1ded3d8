"""Linears quantised once: one safetensors file for all backends, in the cache.

A tensor has its codes under its own name, u8 `[ceil(n / 2)]`, and its absmax under `<name>.absmax`,
fp32 `[ceil(n / 64)]`, as bitsandbytes names them. The entry's name has the digest of the model and
of the tensors that were quantised.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from trainer.model.files import model_digest
from trainer.model.safetensors_headers import TensorHeader, read_file_headers
from trainer.planning.vulkan_buffers import NF4_BLOCK
from trainer.replica.weights.floats import from_bf16, stored_values, to_bf16
from trainer.replica.weights.nf4 import quantize
from trainer.system.errors import InputError, StorageError
from trainer.system.process.slow_log import log_if_slow
from trainer.system.storage.cache_folder import ensure_entry
from trainer.system.storage.new_folder import write_new

log = logging.getLogger(__name__)

NF4_FILE = "nf4.safetensors"
ABSMAX = ".absmax"
_STEP = 1 << 16  # elements at a time, which fit the processor's cache


@contextmanager
def open_quantized(
    model_dir: Path, tensors: Mapping[str, TensorHeader], *, through_bf16: bool
) -> Iterator[dict[str, TensorHeader]]:
    """Yield the headers of every tensor's codes and absmax, quantising them if necessary.

    Args:
        tensors: the stored weights by their new names.
        through_bf16: round to bf16 first, as for a base of that dtype.

    Raises:
        InputError: the file cannot be written anywhere.
    """
    # Of one model one file, whatever the order: its digest is that of the header.
    tensors = dict(sorted(tensors.items()))
    # Weights that are stored in bf16 have one file for both.
    through_bf16 |= {header.dtype for header in tensors.values()} == {"BF16"}
    dtype = "bfloat16" if through_bf16 else "float32"
    metadata = {"source": model_digest(model_dir), "dtype": dtype}
    header = _encode_header(metadata, tensors)
    name = f"{model_dir.name}-nf4-{dtype}"

    def files() -> dict[str, Iterator[bytes | memoryview]]:
        log.info("quantising %d tensors of %s, once on this machine", len(tensors), model_dir)
        return {NF4_FILE: _file_chunks(header, tensors, through_bf16=through_bf16)}

    try:
        with log_if_slow(f"reading the quantised weights of {model_dir}"):
            folder = ensure_entry(name, blake3(header).hexdigest(), files)
    except StorageError as error:
        log.warning("%s; quantised for this run only", error)
    else:
        yield read_file_headers(folder / NF4_FILE)
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = write_new(Path(scratch) / name, files())
        except StorageError as error:
            raise InputError(f"{model_dir}: cannot store the quantised weights: {error}") from None
        yield read_file_headers(folder / NF4_FILE)


def _encode_header(metadata: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> bytes:
    """Return what the file begins with: the format's length, and its JSON."""
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, header in tensors.items():
        elements = math.prod(header.shape)
        codes, blocks = -(-elements // 2), -(-elements // NF4_BLOCK)
        for key, dtype, count, size in (
            (name, "U8", codes, codes),
            (name + ABSMAX, "F32", blocks, 4 * blocks),
        ):
            span = [offset, offset + size]
            entries[key] = {"dtype": dtype, "shape": [count], "data_offsets": span}
            offset += size
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to eight bytes
    return len(text).to_bytes(8, "little") + text


def _file_chunks(
    header: bytes, tensors: Mapping[str, TensorHeader], *, through_bf16: bool
) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors.values():
        scales: list[np.ndarray] = []
        for values in stored_values(tensor, _STEP):
            codes, absmax = quantize(from_bf16(to_bf16(values)) if through_bf16 else values)
            scales.append(absmax)
            yield codes.data
        yield np.concatenate(scales).astype("<f4").view(np.uint8).data
