"""The length of samples in a model's tokens, measured on an even part of a file."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config.run import Classes
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import Encoder
from trainer.data.formats import is_json_lines, read_records
from trainer.data.labels import LabelColumn
from trainer.data.records import MAX_RECORD_BYTES, Problems
from trainer.data.shapes import Sample, parse_sample
from trainer.data.sources import find_data
from trainer.data.values import BadLineError
from trainer.system.regular_file import open_file

MEASURED_BYTES = 1 << 19
"""Bytes to tokenise, a quarter of a second; a smaller file is measured whole."""
_PLACES = 1000
_GOLDEN = (5**0.5 - 1) / 2  # the fractions of its multiples are spread evenly at any count


def measure_lengths(
    path: Path,
    tokenizer_dir: Path,
    classes: Classes | None,
    columns: Mapping[str, str] | None = None,
    *,
    pairs: bool = False,
) -> list[int]:
    """Return the tokens of samples from evenly spaced places of data: of each answer of pairs.

    A bad line is skipped: the reader of all lines reports it.

    Raises:
        InputError: the tokenizer cannot be used.
    """
    encoder = Encoder(tokenizer_dir, "accept")  # the run itself refuses
    lengths: list[int] = []
    for sample in _sample_evenly(path, classes, columns, pairs):
        with contextlib.suppress(ConversationError):
            lengths += [len(encoder.encode(answer)[0]) for answer in sample.answers]
    return lengths


def _sample_evenly(
    path: Path, classes: Classes | None, columns: Mapping[str, str] | None, pairs: bool
) -> Iterator[Sample]:
    """Yield all samples of little data, else some from evenly spread places."""
    labels = None if classes is None else LabelColumn(classes)
    files = find_data(path).files
    if len(files) == 1 and not columns and is_json_lines(files[0]):
        trees = _sample_json_lines(files[0])
    else:
        trees = _thin_records(record.tree for record in read_records(path, Problems(), columns))
    for tree in trees:
        with contextlib.suppress(BadLineError):
            yield parse_sample(tree, 0, labels, pairs=pairs)


def _thin_records(trees: Iterator[Any]) -> Iterator[Any]:
    """Yield every n-th of the records, which are all read: only lines can be sought."""
    kept: list[Any] = []
    step = 1
    for index, tree in enumerate(trees):
        if index % step == 0:
            kept.append(tree)
        if len(kept) > 2 * _PLACES:
            kept, step = kept[::2], 2 * step
    sizes = [len(str(tree)) for tree in kept]
    share = max(1, math.ceil(sum(sizes) / MEASURED_BYTES))
    yield from kept[::share]


def _sample_json_lines(path: Path) -> Iterator[Any]:
    with open_file(path) as file:
        for raw in _sample_lines(file, path.stat().st_size):
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(raw)


def _sample_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= MEASURED_BYTES:
        yield from file
        return
    read = 0
    for number in range(_PLACES):
        file.seek(int(number * _GOLDEN % 1 * size))
        file.readline(MAX_RECORD_BYTES)  # the rest of a line
        raw = file.readline(MAX_RECORD_BYTES)
        read += len(raw)
        if read > MEASURED_BYTES and number:
            return
        yield raw
