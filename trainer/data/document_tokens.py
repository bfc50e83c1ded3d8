"""The documents of a corpus as tokens: encoded rows of a large one, otherwise encoded when read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer.data.chat_marks import ConversationError
from trainer.data.documents import Documents
from trainer.data.encoded_rows import EncodedFile, is_large, open_encoded
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.formats import has_records
from trainer.data.measurement import measure_size
from trainer.data.row_entry import NEVER_CUT, RowSettings
from trainer.data.shapes import Sample
from trainer.data.sources import find_data, find_texts
from trainer.system.errors import InputError

_BATCH_BYTES = 1 << 20  # of text tokenised at once: bounds the library's memory

Range = tuple[int, int]
"""The first document and the one after the last."""
Ids = Sequence[int] | NDArray[np.int32]
Learned = NDArray[np.bool_]


class DocumentTokens(Protocol):
    """The tokens of numbered documents."""

    @property
    def digest(self) -> str:
        """See `Documents.digest`."""
        ...

    def __len__(self) -> int: ...

    def iter_sizes(self) -> Iterator[int]:
        """Yield the bytes of each document's text."""
        ...

    def iter_tokens(self, first: int, stop: int) -> Iterator[tuple[int, Ids, Learned | None]]:
        """Yield numbers of documents, their token ids, at least one, and which are learned.

        None for a text, all of which is learned.

        Raises:
            InputError: a document has none, or has changed since it was hashed.
        """
        ...


def open_documents(
    paths: Sequence[Path], columns: Mapping[str, str], encoder: Encoder
) -> DocumentTokens:
    """Return the documents of paths, see `Documents`; those of large data files as encoded rows.

    Raises:
        DataError, InputError: see `Documents`.
    """
    return _open_rows(paths, columns, encoder) or ReadDocuments(Documents(paths, columns), encoder)


def _open_rows(
    paths: Sequence[Path], columns: Mapping[str, str], encoder: Encoder
) -> EncodedDocuments | None:
    """Return encoded rows; None for little data, texts, and data that cannot be encoded."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and find_texts(path) is not None:
            return None
        found = find_data(path)
        if found.piped or not all(has_records(file, file.name) for file in found.files):
            return None
        files += found.files
    if not is_large(files):
        return None
    settings = RowSettings("causal-lm", None, columns, NEVER_CUT)
    parts: list[EncodedFile] = []
    for path in paths:
        if (part := open_encoded(path, settings, encoder, any_size=True)) is None:
            return None
        parts.append(part)
    return EncodedDocuments(parts)


class EncodedDocuments:
    """Documents that are rows of the cache; see `DocumentTokens`."""

    def __init__(self, parts: Sequence[EncodedFile]) -> None:
        self._rows = [part.rows for part in parts]
        self._begins = [0, *accumulate(map(len, self._rows))]
        hasher = blake3()
        for rows in self._rows:
            for batch in rows.iter_column("digest"):
                hasher.update(b"".join(batch))
        self.digest = hasher.hexdigest()

    def __len__(self) -> int:
        return self._begins[-1]

    def iter_sizes(self) -> Iterator[int]:
        """Yield the bytes of each document's text."""
        for rows in self._rows:
            for batch in rows.iter_column("size"):
                yield from batch.tolist()

    def iter_tokens(self, first: int, stop: int) -> Iterator[tuple[int, Ids, Learned | None]]:
        """Yield numbers of documents, their token ids, and which are learned."""
        for number in range(first, stop):
            part = bisect_right(self._begins, number) - 1
            row = self._rows[part][number - self._begins[part]]
            yield number, row.input_ids, np.asarray(row.labels) != IGNORED


class ReadDocuments:
    """Documents that are read and encoded when they are asked for; see `DocumentTokens`."""

    def __init__(self, documents: Documents, encoder: Encoder) -> None:
        self._documents, self._encoder = documents, encoder
        self.digest = documents.digest

    def __len__(self) -> int:
        return len(self._documents)

    def iter_sizes(self) -> Iterator[int]:
        """Yield the bytes of each document's text."""
        return map(measure_size, self._documents)

    def iter_tokens(self, first: int, stop: int) -> Iterator[tuple[int, Ids, Learned | None]]:
        """Yield numbers of documents, their token ids, and which are learned."""
        sizes = (measure_size(self._documents[number]) for number in range(first, stop))
        for begin, end in group_documents(sizes, _BATCH_BYTES):
            numbers = range(first + begin, first + end)
            samples = [self._documents[number] for number in numbers]
            texts = iter(self._encoder.encode_texts([each for each in samples if _is_text(each)]))
            for number, sample in zip(numbers, samples, strict=True):
                if _is_text(sample):
                    ids, learned = self._encoder.append_end(next(texts)), None
                else:
                    try:
                        ids, labels = self._encoder.encode(sample)
                    except ConversationError as error:
                        source = self._documents.describe_location(number)
                        raise InputError(f"{source}: {error}") from None
                    learned = np.array(labels) != IGNORED
                if not ids:
                    source = self._documents.describe_location(number)
                    raise InputError(f"{source}: the tokenizer returns no token for it")
                yield number, ids, learned


def _is_text(sample: Sample) -> bool:
    return not sample.messages and not sample.prompt


def group_documents(sizes: Iterator[int], least: int) -> Iterator[Range]:
    """Yield consecutive ranges of size `least` or just above; the last may be smaller."""
    first = number = total = 0
    for number, size in enumerate(sizes, start=1):
        total += size
        if total >= least:
            yield first, number
            first, total = number, 0
    if number > first:
        yield first, number
