"""A process that encodes pieces of JSON Lines: `python -P -m trainer.data.row_encoder`.

Its stdin holds the settings, then a piece after another; it answers each on stdout. A message has
its length before it. A piece whose lines are not all samples that can be encoded is answered with
`{"irregular": true}`: the reader in one process then finds and names what is wrong.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.config.data import LostText
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.fitting import encode_within
from trainer.data.records import Problems, json_lines, rename_keys
from trainer.data.sample import Sample
from trainer.data.shapes import UnusedKeys, parse_sample
from trainer.data.values import BadLineError
from trainer.system.errors import InputError

SCHEMA = pa.schema([("ids", pa.list_(pa.int32())), ("learned", pa.list_(pa.bool_()))])
"""Of a row: its tokens, and which of them are targets."""
DIGEST = 16
"""Bytes of a sample's digest that are kept."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class EncoderSettings:
    """What the tokens of a row depend on beside its line."""

    model: str
    lost_text: LostText
    date: str
    max_seq_len: int
    columns: dict[str, str]


@dataclass
class PieceReport:
    """What a piece holds beside its tokens; a list has a value for each row."""

    lengths: list[int] = field(default_factory=list[int])
    """Tokens before a row is cut."""
    kept: list[int] = field(default_factory=list[int])
    unlearned: list[bool] = field(default_factory=list[bool])
    lost_text: list[bool] = field(default_factory=list[bool])
    markup: list[list[Any]] = field(default_factory=list[list[Any]])
    """The row and the special token of answers that have one as plain text."""
    conversation: list[bool] = field(default_factory=list[bool])
    unused: list[list[Any]] = field(default_factory=list[list[Any]])
    """Of lines and of turns: counts by key, and the number of others."""


def send(stream: IO[bytes], *parts: bytes | memoryview) -> None:
    """Write one message for each part."""
    for part in parts:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end of the stream, also within a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    message = stream.read(size)
    return message if len(message) == size else None


class RowEncoder:
    """Encodes the lines of pieces."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._settings = settings
        self._encoder = Encoder(Path(settings.model), settings.lost_text, settings.date)

    def encode(self, piece: bytes) -> tuple[PieceReport, bytes, bytes]:
        """Return the report, the digests and the rows of a piece, these as a stream of Arrow.

        Raises:
            InputError: a line is no sample, or cannot be encoded.
        """
        report, digests, problems, unused = PieceReport(), bytearray(), Problems(), UnusedKeys()
        ids: list[list[int]] = []
        learned: list[NDArray[np.bool_]] = []
        lines = json_lines(io.BytesIO(piece), "", 0, problems)
        for record in rename_keys(lines, self._settings.columns, problems):
            try:
                sample = parse_sample(record.tree, record.number)
                unused.add(record.tree, sample)
            except BadLineError as error:
                raise InputError(str(error)) from None
            tokens, targets = self._row(sample, report)
            ids.append(tokens)
            learned.append(targets)
            digests += sample.digest()[:DIGEST]
        problems.check()
        report.unused = unused.counts()
        batch = pa.record_batch([ids, learned], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(batch)
        return report, bytes(digests), sink.getvalue().to_pybytes()

    def _row(self, sample: Sample, report: PieceReport) -> tuple[list[int], NDArray[np.bool_]]:
        """Return the tokens of a sample, and which are targets; note in the report what it is."""
        limit, encoder = self._settings.max_seq_len, self._encoder
        ids, labels, lost = encoder.encode_checked(sample)
        report.lengths.append(len(ids))
        if len(ids) > limit:
            ids, labels = encode_within(encoder, sample, limit)
        if not ids or (encoder.known is not None and max(ids) >= encoder.known):
            raise InputError("no token, or one that the model does not know")
        targets = np.array(labels)
        learned = targets != IGNORED
        if (targets[learned] != np.array(ids)[learned]).any():
            raise InputError("targets that are other tokens")
        learned[0] = False
        report.kept.append(len(ids))
        report.unlearned.append(not learned.any())
        report.lost_text.append(lost is not None)
        report.conversation.append(bool(sample.messages))
        if sample.messages and (markup := encoder.plain_markup(sample)):
            report.markup.append([len(report.kept) - 1, markup])
        return ids, learned


def main() -> None:
    """Answer one piece after another until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    settings = receive(source)
    if settings is None:
        return
    encoder = RowEncoder(EncoderSettings(**json.loads(settings)))
    while (piece := receive(source)) is not None:
        try:
            report, digests, rows = encoder.encode(piece)
            send(answers, json.dumps(vars(report)).encode(), digests, rows)
        except InputError:
            send(answers, b'{"irregular": true}')


if __name__ == "__main__":
    main()
