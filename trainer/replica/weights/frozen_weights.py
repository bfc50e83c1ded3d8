"""The frozen weights of a model's layers, where its files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.model.safetensors_headers import TensorHeader
from trainer.replica.weights.stored_file import StoredFile

_ALIGNMENT = 256
"""Bytes at whose multiples a read begins in memory: what a GPU's memory is aligned to."""
_ALIGNED = 16
"""Bytes at whose multiples a tensor begins in memory: the widest load of an instruction on GPUs."""


@dataclass(frozen=True)
class _Read:
    """Bytes that lie together in a file and in memory: `file[begin:end]` goes to `offset`."""

    file: Path
    begin: int
    end: int
    offset: int


class FrozenWeights:
    """The tensors of layers as one contiguous span of memory a layer.

    Tensors that lie together in a file are read together, whatever their order: a layer of a folder
    that transformers wrote is four reads, one of an NF4 file is one.

    Args:
        layers: each layer's tensors by name.

    Raises:
        InputError: a file cannot be opened.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, TensorHeader]]) -> None:
        self._reads: dict[int, list[_Read]] = {}
        self._places: dict[int, dict[str, tuple[int, int]]] = {}
        for number, tensors in layers.items():
            self._reads[number], self._places[number] = _arrange_reads(tensors)
        self.layers = tuple(sorted(layers))
        self.span_bytes = max(
            reads[-1].offset + _span_size(reads[-1]) for reads in self._reads.values()
        )
        """Bytes of the largest layer's span."""
        paths = {read.file for reads in self._reads.values() for read in reads}
        self._files = {path: StoredFile(path) for path in paths}

    def close(self) -> None:
        """Close the files, which nothing reads any more."""
        for file in self._files.values():
            file.close()

    def span(self, layer: int, name: str) -> tuple[int, int]:
        """Return where a tensor begins and ends in its layer's span, in bytes."""
        return self._places[layer][name]

    def read_layer(self, layer: int, memory: memoryview) -> int:
        """Read a layer's span into the beginning of `memory`; return the bytes read.

        Raises:
            InputError: a file is truncated, was changed or replaced since it was opened, or its
                disk fails.
        """
        for read in self._reads[layer]:
            names = self._places[layer]
            part = f"layer {layer}" if len(names) > 1 else next(iter(names))
            file = self._files[read.file]
            file.fill(memory[read.offset : read.offset + _span_size(read)], read.begin, part)
            file.check_unchanged(part)
        return sum(map(_span_size, self._reads[layer]))


def _arrange_reads(
    tensors: Mapping[str, TensorHeader],
) -> tuple[list[_Read], dict[str, tuple[int, int]]]:
    """Return the reads of a layer in the order of its memory, and each tensor's begin and end."""
    reads: list[_Read] = []
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, header in sorted(
        tensors.items(), key=lambda item: (str(item[1].file), item[1].begin)
    ):
        last = reads[-1] if reads else None
        size = header.end - header.begin
        # The next tensor must be aligned in memory, whatever the size of this one.
        follows = last and (last.file, last.end) == (header.file, header.begin)
        joins = follows and end % _ALIGNED == 0
        if last and joins:
            reads[-1] = _Read(last.file, last.begin, header.end, last.offset)
        else:
            end += -end % _ALIGNMENT
            reads.append(_Read(header.file, header.begin, header.end, end))
        places[name] = end, end + size
        end += size
    return reads, places


def _span_size(read: _Read) -> int:
    return read.end - read.begin
