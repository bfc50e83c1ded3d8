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
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.config.run import Classes, Task
from trainer.data.encoder import IGNORED, EncoderSource
from trainer.data.labels import Kind, LabelColumn
from trainer.data.measurement import measure_size
from trainer.data.prompts import turns_before
from trainer.data.records import Problems, read_json_lines, rename_keys
from trainer.data.sample import Sample
from trainer.data.shapes import KeyCounts, parse_sample
from trainer.data.truncation import encode_answers
from trainer.data.values import BadLineError
from trainer.system.errors import InputError

SCHEMA = pa.schema(
    [
        *(("ids", pa.list_(pa.int32())), ("learned", pa.list_(pa.bool_())), ("label", pa.int32())),
        *(("digest", pa.binary(32)), ("size", pa.int32()), ("record", pa.binary())),
    ]
)
"""Schema of a row: its tokens, which of them are targets, or its class; and of its sample the
digest, the bytes of its text, and of a prompt the record as JSON. A preference has two rows."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings on which the tokens of a row depend beside its line."""

    encoder: EncoderSource | None
    """None: rows have no tokens."""
    max_seq_len: int
    columns: dict[str, str]
    task: Task
    classes: Classes | None
    prompts: bool


@dataclass
class PieceReport:
    """Facts on a piece beside its tokens; a list has a value for each row."""

    lengths: list[int] = field(default_factory=list[int])
    """Tokens of a sample before it is cut, of a preference those of both answers."""
    longest: list[int] = field(default_factory=list[int])
    """Tokens of the longer answer before it is cut."""
    kept: list[int] = field(default_factory=list[int])
    unlearned: list[bool] = field(default_factory=list[bool])
    lost_text: list[bool] = field(default_factory=list[bool])
    remarks: list[list[Any]] = field(default_factory=list[list[Any]])
    """The row and the special token of answers that have one as plain text."""
    conversation: list[bool] = field(default_factory=list[bool])
    label: list[int] = field(default_factory=list[int])
    """The class; -1 where a sample is of none."""
    kind: Kind | None = None
    """Kind of the labels."""
    keys: list[list[Any]] = field(default_factory=list[list[Any]])
    """Rows of `KeyCounts`."""


def send_message(stream: IO[bytes], *parts: bytes | memoryview) -> None:
    """Write one message for each part."""
    for part in parts:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def receive_message(stream: IO[bytes]) -> bytes | None:
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
        self._encoder = settings.encoder and settings.encoder.open_encoder()
        classes = settings.classes
        # JSON has no tuple.
        classes = classes if classes is None or isinstance(classes, int) else tuple(classes)
        self._labels = None if classes is None else LabelColumn(classes)
        self._pairs = settings.task == "dpo"

    def encode(self, piece: bytes) -> tuple[PieceReport, bytes]:
        """Return the report and the rows of a piece, these as a stream of Arrow.

        Raises:
            InputError: a line is no sample, or cannot be encoded.
        """
        report, problems = PieceReport(), Problems()
        keys = KeyCounts(self._labels, pairs=self._pairs)
        ids: list[list[int]] = []
        learned: list[NDArray[np.bool_]] = []
        labels: list[int | None] = []
        digests: list[bytes] = []
        sizes: list[int] = []
        records: list[bytes | None] = []
        prompts = self._settings.prompts
        lines = read_json_lines(io.BytesIO(piece), "", 0, problems)
        for record in rename_keys(lines, self._settings.columns, problems):
            try:
                sample = parse_sample(
                    record.tree,
                    record.number,
                    self._labels,
                    prompts=prompts,
                    pairs=self._pairs,
                )
                keys.add(record.tree, sample)
            except BadLineError as error:
                raise InputError(str(error)) from None
            for tokens, targets in self._encode_rows(sample, report):
                ids.append(tokens)
                learned.append(targets)
                labels.append(sample.label)
            digests += [sample.digest()] * len(sample.answers)
            sizes += [measure_size(sample)] * len(sample.answers)
            tree = json.dumps(record.tree).encode() if prompts else None
            records += [tree] * len(sample.answers)
        problems.raise_if_any()
        report.keys = keys.export_counts()
        report.kind = self._labels and self._labels.kind
        batch = pa.record_batch([ids, learned, labels, digests, sizes, records], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(batch)
        return report, sink.getvalue().to_pybytes()

    def _encode_rows(
        self, sample: Sample, report: PieceReport
    ) -> list[tuple[list[int], NDArray[np.bool_]]]:
        """Return of each answer of a sample the tokens, and which are targets; note what it is."""
        limit, encoder = self._settings.max_seq_len, self._encoder
        checked: list[tuple[list[int], list[int], str | None]] = [([], [], None)] * len(
            sample.answers
        )
        if encoder and self._settings.prompts:
            turns_before(sample)
            prompt = encoder.encode_prompt(sample)
            checked = [(prompt, [IGNORED] * len(prompt), None)]
        elif encoder:
            checked = [encoder.encode_checked(answer) for answer in sample.answers]
        lengths = [len(ids) for ids, _, _ in checked]
        found = [(ids, labels) for ids, labels, _ in checked]
        if encoder and max(lengths) > limit:
            found = encode_answers(encoder, sample, limit)
        rows = [(ids, self._find_targets(sample, ids, labels)) for ids, labels in found]
        report.lengths.append(sum(lengths))
        report.longest.append(max(lengths))
        report.kept.append(sum(len(ids) for ids, _ in rows))
        report.label.append(-1 if sample.label is None else sample.label)
        report.unlearned.append(
            encoder is not None
            and not self._settings.prompts
            and sample.label is None
            and not any(targets.any() for _, targets in rows)
        )
        report.lost_text.append(any(lost is not None for _, _, lost in checked))
        report.conversation.append(bool(sample.messages))
        if encoder and sample.messages:
            remarks = set(filter(None, map(encoder.remark_answers, sample.answers)))
            report.remarks += [[len(report.kept) - 1, each] for each in sorted(remarks)]
        return rows

    def _find_targets(self, sample: Sample, ids: list[int], labels: list[int]) -> NDArray[np.bool_]:
        if self._encoder is None:
            return np.zeros(0, np.bool_)
        known = self._encoder.known
        if not ids or (known is not None and max(ids) >= known):
            raise InputError("no token, or one that the model does not know")
        if sample.label is not None:
            return np.zeros(0, np.bool_)
        targets = np.array(labels)
        learned = targets != IGNORED
        if (targets[learned] != np.array(ids)[learned]).any():
            raise InputError("targets that are other tokens")
        learned[0] = False
        return learned


def main() -> None:
    """Answer one piece after another until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    settings = receive_message(requests)
    if settings is None:
        return
    tree = json.loads(settings)
    source = tree.pop("encoder")
    encoder = RowEncoder(
        EncoderSettings(**tree, encoder=None if source is None else EncoderSource(**source))
    )
    while (piece := receive_message(requests)) is not None:
        try:
            report, rows = encoder.encode(piece)
            send_message(answers, json.dumps(vars(report)).encode(), rows)
        except InputError:
            send_message(answers, b'{"irregular": true}')


if __name__ == "__main__":
    main()
