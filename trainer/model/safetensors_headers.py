"""The contents of a model directory, from its config.json and safetensors headers alone.

The safetensors format: eight bytes of little-endian header length, a JSON header of that length,
then the tensors' bytes (https://huggingface.co/docs/safetensors). Nothing here reads a weight.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trainer.model.formats import find_conversion, refuse_pointer
from trainer.system.errors import InputError
from trainer.system.regular_file import open_file, read_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)
"""The families' names of the maximal length in tokens: most, GPT-2, MPT, ..."""
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor; its bytes are `file[begin:end]`, offsets counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    def slice_rows(self, start: int, stop: int) -> TensorHeader:
        """Return rows `start` to `stop` (exclusive) of a matrix."""
        row = (self.end - self.begin) // self.shape[0]
        begin, end = (self.begin + number * row for number in (start, stop))
        return replace(self, shape=(stop - start, *self.shape[1:]), begin=begin, end=end)


def stored_dtype(headers: Mapping[str, TensorHeader]) -> str:
    """Return the dtype of most of a model's elements: `BF16`, `F32`, ...; `BF16` of none."""
    sizes = Counter[str]()
    for header in headers.values():
        sizes[header.dtype] += math.prod(header.shape)
    return sizes.most_common(1)[0][0] if sizes else "BF16"


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the directory's config.json.

    Raises:
        InputError: the directory or the file is missing or not a JSON object.
    """
    if not model_dir.is_dir():
        raise InputError(f"{model_dir}: no such model directory")
    path = model_dir / "config.json"
    if not path.is_file():
        other = find_conversion(model_dir) or "no config.json, so this is not a Hugging Face model"
        raise InputError(f"{model_dir}: {other}")
    return read_object(path)


def read_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """Return every tensor of a model directory by name, from one file, else by an index.

    One file counts first, as in transformers: the index beside it is left over.

    Raises:
        InputError: a file is missing, truncated or damaged.
    """
    index = model_dir / INDEX_FILE
    single = model_dir / SINGLE_FILE
    if single.exists() or not index.is_file():
        if not single.exists() and (other := find_conversion(model_dir)):
            raise InputError(f"{model_dir}: {other}")
        return read_file_headers(single)
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: no weight_map, download the model again")
    shards: dict[str, dict[str, TensorHeader]] = {}
    headers: dict[str, TensorHeader] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{index}: {name} points outside the model directory")
        if shard not in shards:
            shards[shard] = read_file_headers(model_dir / shard)
        if name not in shards[shard]:
            raise InputError(f"{model_dir / shard}: {name} is missing, download the model again")
        headers[name] = shards[shard][name]
    return headers


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """Return every tensor of one safetensors file by name.

    Raises:
        InputError: the file is missing, truncated or damaged.
    """
    tree, origin, size = _read_header(path)
    return {
        name: _parse_tensor(path, name, entry, origin, size)
        for name, entry in tree.items()
        if name != "__metadata__"
    }


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of one safetensors file.

    Raises:
        InputError: the file is missing, truncated or damaged.
    """
    metadata: Any = _read_header(path)[0].get("__metadata__")
    return cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the offset behind it, and the file's size."""
    refuse_pointer(path)
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            # Before the read: the length is only the file's claim.
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise InputError(f"{path}: damaged or truncated safetensors file")
            raw = file.read(length)
        tree: Any = json.loads(raw)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; weights must be in safetensors format") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: damaged safetensors header") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: damaged safetensors header")
    return cast("dict[str, Any]", tree), 8 + length, size


def _parse_tensor(path: Path, name: str, entry: Any, origin: int, file_size: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        expected = math.prod(shape) * _ELEMENT_BYTES[dtype]
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{path}: damaged safetensors header at {name}") from None
    if not whole or end - begin != expected:
        raise InputError(f"{path}: damaged safetensors header at {name}")
    if origin + end > file_size:
        raise InputError(f"{path}: truncated inside {name}, download or copy it again")
    return TensorHeader(dtype, tuple(shape), path, origin + begin, origin + end)


def read_position_count(config: Mapping[str, Any]) -> int | None:
    """Return the maximal length in tokens by a config.json; None if it has none."""
    inner: Any = config.get("text_config")
    trees = (config, cast("dict[str, Any]", inner) if isinstance(inner, dict) else {})
    for tree in trees:
        for name in _POSITIONS:
            if type(tree.get(name)) is int and tree[name] > 0:
                return tree[name]
    return None


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the object that a JSON file of a model holds.

    Args:
        optional: a file that is not there holds an empty one.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    refuse_pointer(path)
    try:
        tree: Any = json.loads(read_file(path))
    except OSError as error:
        if optional and isinstance(error, FileNotFoundError):
            return {}
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not valid JSON") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a JSON object")
    return cast("dict[str, Any]", tree)
