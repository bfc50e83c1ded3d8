"""Samples become token ids, with the `tokenizers` library alone: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.shapes import Sample
from trainer.data.soft_targets import SoftTargets
from trainer.data.truncation import encode_answers
from trainer.system.errors import InputError

_KEPT = 256 << 20
"""Bytes of encoded samples that are kept; more are encoded again whenever they are read."""
_OVERHEAD = 400
"""Bytes of the objects around a sample's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One sample as a replica reads it."""

    input_ids: NDArray[np.int32]
    """`[T]`, at least one token."""
    labels: int | NDArray[np.int32]
    """The class, or `[T]` unshifted targets: `labels[t]` is `input_ids[t]`, predicted from the
    tokens before it, or `IGNORED`. `labels[0]` is always ignored, so the valid ones count."""
    soft: SoftTargets | None = None
    """A teacher's prediction of each token, beside `labels`."""
    rejected: Encoded | None = None
    """Worse answer of a pair, after the same prompt."""

    @property
    def answers(self) -> tuple[Encoded, ...]:
        """The rows of a replica: itself, and of a pair the worse answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def tokens(self) -> int:
        """Input tokens, of a pair those of both rows."""
        return sum(len(row.input_ids) for row in self.answers)


class Dataset:
    """The samples of a file in order, each encoded on first use.

    A worker is therefore ready when the file is read and checked: encoding a shard takes a
    millisecond or two, a whole file seconds to minutes.
    """

    def __init__(
        self, path: Path, samples: Sequence[Sample], encoder: Encoder, max_seq_len: int
    ) -> None:
        self._path, self._samples = path, samples
        self._encoder = encoder
        self._max_seq_len = max_seq_len
        self._kept: dict[int, Encoded] = {}
        self._room = _KEPT

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = self._kept.get(index)
        if row is None:
            row = self._encode(self._samples[index])
            arrays = [part for each in row.answers for part in (each.input_ids, each.labels)]
            size = _OVERHEAD + sum(0 if isinstance(part, int) else part.nbytes for part in arrays)
            if size <= self._room:
                self._room -= size
                self._kept[index] = row
        return row

    def _encode(self, sample: Sample) -> Encoded:
        """Encode one sample, cut to `max_seq_len` tokens.

        Raises:
            InputError: it has no token, or one that the model has no embedding for.
        """
        place = sample.place(self._path)
        try:
            found = encode_answers(self._encoder, sample, self._max_seq_len)
        except ConversationError as error:
            raise InputError(f"{place}: {error}") from None
        rows = [self._build_row(sample, place, *each) for each in found]
        return rows[0] if len(rows) == 1 else replace(rows[0], rejected=rows[1])

    def _build_row(self, sample: Sample, place: str, ids: list[int], labels: list[int]) -> Encoded:
        if not ids:
            raise InputError(f"{place}: the tokenizer returns no token for it")
        input_ids = np.array(ids, dtype=np.int32)
        known = self._encoder.known
        if known is not None and (largest := int(input_ids.max())) >= known:
            # A device may not detect it.
            raise InputError(
                f"{place}: the tokenizer makes token {largest} of it, the model"
                f" has {known}; use the tokenizer that the model was trained with"
            )
        input_ids.flags.writeable = False
        if sample.label is not None:
            return Encoded(input_ids, sample.label)
        targets = np.array(labels, dtype=np.int32)
        targets[0] = IGNORED
        targets.flags.writeable = False
        return Encoded(input_ids, targets)
