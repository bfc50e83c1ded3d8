"""The length of samples in a model's tokens, measured on an even part of a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.config.run import Classes
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import Encoder
from trainer.data.labels import LabelColumn
from trainer.data.records import MAX_RECORD_BYTES
from trainer.data.shapes import Sample, parse_sample
from trainer.data.values import BadLineError

MEASURED_BYTES = 1 << 19
"""Bytes to tokenise, a quarter of a second; a smaller file is measured whole."""
_PLACES = 1000
_GOLDEN = (5**0.5 - 1) / 2  # the fractions of its multiples are spread evenly at any count


def measure_lengths(path: Path, tokenizer_dir: Path, classes: Classes | None) -> list[int]:
    """Return the tokens of samples from evenly spaced places of a JSON Lines file.

    A bad line is skipped: the reader of all lines reports it.

    Raises:
        InputError: the tokenizer cannot be used.
    """
    encoder = Encoder(tokenizer_dir, "accept")  # the run itself refuses
    lengths: list[int] = []
    for sample in _spread(path, classes):
        with contextlib.suppress(ConversationError):
            ids, _ = encoder.encode(sample)
            lengths.append(len(ids))
    return lengths


def _spread(path: Path, classes: Classes | None) -> Iterator[Sample]:
    """Yield all samples of a small file, else those after evenly spread bytes."""
    labels = None if classes is None else LabelColumn(classes)
    with path.open("rb") as file:
        for raw in _lines(file, path.stat().st_size):
            with contextlib.suppress(ValueError, RecursionError, BadLineError):
                yield parse_sample(json.loads(raw), 0, labels)


def _lines(file: BinaryIO, size: int) -> Iterator[bytes]:
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
