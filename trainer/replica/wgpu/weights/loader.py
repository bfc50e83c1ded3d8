"""Load the frozen base from a Hugging Face directory onto the device, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.initialization import initial_tensor
from trainer.model.layout import SIDE_A, TensorSlot, stored_name
from trainer.model.safetensors_headers import TensorHeader, read_headers
from trainer.planning.stored_layers import split_head
from trainer.planning.vulkan import EMBEDDING, HEAD, frozen_tensors, name_chunk, shared_matrices
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.weights.floats import from_bf16, stored_values, to_bf16
from trainer.replica.weights.nf4_file import ABSMAX, open_quantized
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.weights.layer_uploads import (
    EmbeddingRows,
    LayerUploads,
    StoredTensors,
)
from trainer.system.errors import InputError

_STEP = 1 << 22  # elements of a piece


@dataclass(frozen=True)
class FrozenBase:
    """Everything that does not train, on the device."""

    arrays: dict[str, Array]
    """By the layout's names; matrices that are not resident share them."""
    uploads: LayerUploads | None
    """Writes the layers that are not resident; None: all are."""


def take_frozen(
    model: Architecture, config: RunConfig, pool: MemoryPool, resident: int | None = None
) -> dict[str, Array]:
    """Take memory for everything that does not train, by the layout's names; not filled.

    Vectors are fp32, rounded to the config's dtype.

    Args:
        resident: layers whose linears stay on the device; None: those of `model.resident`.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    shared, taken = shared_matrices(model, config, resident), dict[str, Array]()
    for name, shape, kind in frozen_tensors(model, config, resident):
        array = taken.get(shared.get(name, name))
        if array is None:
            taken[name] = pool.take(shape, kind, purpose="frozen")
        else:  # the last chunk of a head may have fewer rows
            taken[name] = array.slice_rows(0, shape[0])
    return taken


def load_frozen(
    model_dir: Path, config: RunConfig, pool: MemoryPool, resident: int | None = None
) -> FrozenBase:
    """Take memory as `take_frozen` does and fill it from a model directory.

    Raises:
        InputError: the model is missing, damaged or unsupported.
        DeviceError: it does not fit (OutOfMemoryError), or the device fails.
    """
    device = pool.device
    assert device is not None, "a plan cannot be loaded"
    architecture = read_architecture(model_dir)
    arrays = take_frozen(architecture, config, pool, resident)
    shared = shared_matrices(architecture, config, resident)
    drawn = {name for name in arrays if name.endswith(SIDE_A)}
    chunks = _list_chunks(model_dir, architecture, arrays) if name_chunk(0) in arrays else []
    single = arrays.keys() - drawn - {name_chunk(number) for number in range(len(chunks))}
    headers = _find_stored(model_dir, single)
    for name, header in headers.items():
        assert header.shape == arrays[name].shape, f"{name}: the layout would have refused this"
    for name in drawn:
        slot = TensorSlot(name, arrays[name].shape, 0)
        _upload_chunks(device, arrays[name], [initial_tensor(headers, config.training.seed, slot)])
    rounded = config.model.dtype == "bfloat16"
    packed = {name: header for name, header in headers.items() if arrays[name].kind == "nf4"}
    for name in headers.keys() - packed.keys() - shared.keys():
        array = arrays[name]
        _upload_chunks(device, array, _convert_tensor(headers[name], array.kind, rounded))
    with ExitStack() as opened:
        if packed:
            quantized = open_quantized(model_dir, packed, through_bf16=rounded)
            headers |= opened.enter_context(quantized)

        def stored_parts(name: str) -> StoredTensors:
            """Return the tensors of the file that make one on the device."""
            parts, scales = {name: (headers[name], arrays[name])}, arrays[name].scales
            if scales is not None:
                parts[name + ABSMAX] = headers[name + ABSMAX], scales
            return parts

        for name in packed.keys() - shared.keys():
            for header, array in stored_parts(name).values():
                _upload_chunks(device, array, _read_raw(header))
        layers: dict[int, StoredTensors] = {}
        for name in filter(single.__contains__, shared):
            layers.setdefault(int(name.split(".")[2]), {}).update(stored_parts(name))
        # A file that no cache keeps goes with what reads it.
        uploads = LayerUploads(device, layers, chunks, opened.pop_all()) if layers else None
    if uploads is not None and EMBEDDING not in arrays:
        uploads.embedding = EmbeddingRows(device, _find_stored(model_dir, [EMBEDDING])[EMBEDDING])
    return FrozenBase(arrays, uploads)


def _list_chunks(
    model_dir: Path, model: Architecture, arrays: dict[str, Array]
) -> list[StoredTensors]:
    """Return the chunks of a head that is not resident, in order."""
    (whole,) = _find_stored(model_dir, [EMBEDDING if model.tied else HEAD]).values()
    return [
        {HEAD: (whole.slice_rows(rows.start, rows.stop), arrays[name_chunk(number)])}
        for number, rows in enumerate(split_head(model.vocab_size, model.hidden_size))
    ]


def _find_stored(model_dir: Path, names: Iterable[str]) -> dict[str, TensorHeader]:
    headers = read_headers(model_dir)
    found: dict[str, TensorHeader] = {}
    for name in names:
        stored = stored_name(headers, name)
        if stored is None:
            raise InputError(f"{model_dir}: {name} is missing from the weights")
        found[name] = headers[stored]
    return found


def _convert_tensor(header: TensorHeader, kind: Kind, rounded: bool) -> Iterator[np.ndarray]:
    for values in stored_values(header, _STEP):
        if kind == "bf16":
            yield to_bf16(values)
        else:
            yield from_bf16(to_bf16(values)) if rounded else values


def _read_raw(header: TensorHeader) -> Iterator[np.ndarray]:
    stored = np.memmap(header.file, np.uint8, "r", header.begin, header.end - header.begin)
    for start in range(0, len(stored), _STEP):
        yield stored[start : start + _STEP]


def _upload_chunks(device: Device, array: Array, pieces: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write consecutive pieces; all but the last are whole aligned windows."""
    words = replace(array, shape=(array.nbytes // 4,), kind="u32", scales=None)
    start = 0
    for piece in pieces:
        raw = piece.view(np.uint8)
        raw = np.pad(raw, (0, -raw.size % 4)) if raw.size % 4 else raw
        stop = start + raw.size // 4
        device.write(words.slice_rows(start, stop), raw)
        device.submit(
            device.create_encoder()
        )  # otherwise the driver stages the whole model in host memory
        start = stop
    assert start == words.size, f"{start} words of {words.size}"
