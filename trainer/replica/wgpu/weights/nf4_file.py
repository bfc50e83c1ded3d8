"""Linears quantised once: one safetensors file for all backends, beside the model if possible.

A tensor has its codes under its own name, u8 `[ceil(n / 2)]`, and its absmax under `<name>.absmax`,
fp32 `[ceil(n / 64)]`, as bitsandbytes names them. The metadata holds the BLAKE3 of the model that
they were made from and of the tensors' bytes; a file that does not match is rewritten.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from trainer.model.files import model_digest
from trainer.model.safetensors_headers import TensorHeader, read_file_headers
from trainer.planning.vulkan_buffers import NF4_BLOCK
from trainer.replica.wgpu.weights.floats import from_bf16, stored_values, to_bf16
from trainer.replica.wgpu.weights.nf4 import quantize
from trainer.system.errors import InputError
from trainer.system.process.announcement import announced

log = logging.getLogger(__name__)

SCHEMA = "motley.nf4/1"
ABSMAX = ".absmax"
_STEP = 1 << 16  # elements at a time, which fit the processor's cache


@contextmanager
def quantized(
    model_dir: Path, tensors: Mapping[str, TensorHeader], *, through_bf16: bool
) -> Iterator[dict[str, TensorHeader]]:
    """Yield the headers of every tensor's codes and absmax, quantising them if necessary.

    Args:
        tensors: the stored weights by their new names.
        through_bf16: round to bf16 first, as for a base of that dtype.

    Raises:
        InputError: the file cannot be written anywhere.
    """
    dtype = "bfloat16" if through_bf16 else "float32"
    metadata = {"schema": SCHEMA, "source": model_digest(model_dir), "dtype": dtype}
    places = [
        model_dir / f"motley-nf4-{dtype}.safetensors",
        _cache_folder() / f"nf4-{dtype}-{metadata['source']}.safetensors",
    ]
    for path in places:
        if path.exists():
            with announced(f"hashing {path}"):
                matches = _matches(path, metadata, tensors)
            if matches:
                yield read_file_headers(path)
                return
            log.warning("%s: damaged, or of another model; it is rewritten", path)
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with announced(f"quantising {model_dir}"):
                _make(path, metadata, tensors)
        except OSError as error:
            log.info("%s: cannot be written: %s", path, error.strerror)
            continue
        yield read_file_headers(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nf4.safetensors"
        try:
            with announced(f"quantising {model_dir}"):
                _make(path, metadata, tensors)
        except OSError as error:
            raise InputError(
                f"{model_dir}: no place for the quantised weights: {error.strerror}"
            ) from None
        log.warning("%s: quantised for this run only: no folder could store it", model_dir)
        yield read_file_headers(path)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motley"


def _entries(tensors: Mapping[str, TensorHeader]) -> dict[str, dict[str, Any]]:
    """Return the safetensors header without metadata, in the order of the bytes."""
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
    return entries


def _make(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> None:
    """Write the file under another name and rename it once it is complete."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            log.info("quantising %d tensors into %s", len(tensors), path)
            _write(file, metadata, tensors)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(
    file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, TensorHeader]
) -> None:
    entries = _entries(tensors)
    hasher = blake3()
    # The header comes first and has the digest of the rest: it is written twice, equally long.
    _write_header(file, {**metadata, "blake3": "0" * 64}, entries)
    for header in tensors.values():
        scales: list[np.ndarray] = []
        for values in stored_values(header, _STEP):
            rounded = from_bf16(to_bf16(values)) if metadata["dtype"] == "bfloat16" else values
            codes, absmax = quantize(rounded)
            scales.append(absmax)
            file.write(codes.data)
            hasher.update(codes.data)
        joined = np.concatenate(scales).astype("<f4").view(np.uint8)
        file.write(joined.data)
        hasher.update(joined.data)
    file.seek(0)
    _write_header(file, {**metadata, "blake3": hasher.hexdigest()}, entries)


def _write_header(
    file: BinaryIO, metadata: Mapping[str, str], entries: Mapping[str, Mapping[str, Any]]
) -> None:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to eight bytes
    file.write(len(text).to_bytes(8, "little") + text)


def _matches(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> bool:
    """Return whether a file is what `_make` would write, judged by header and digest."""
    try:
        read_file_headers(path)  # sizes and offsets make sense
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tree = json.loads(file.read(length))
            found = tree.pop("__metadata__")
            digest = found.pop("blake3")
            if found != metadata or tree != _entries(tensors):
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                hasher = blake3(max_threads=blake3.AUTO)
                with memoryview(whole) as view, view[8 + length :] as data:
                    hasher.update(data)
                return hasher.hexdigest() == digest
    except (InputError, OSError, ValueError, KeyError, AttributeError):
        return False
