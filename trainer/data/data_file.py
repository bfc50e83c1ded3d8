"""A data file as a run uses it, whether its samples are in memory or encoded in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from trainer.config.run import Task
from trainer.data.digests import Digests
from trainer.data.encoder import Encoder
from trainer.data.labels import Kind
from trainer.data.measurement import Measurement
from trainer.data.sample import Sample
from trainer.data.tokens import Dataset


@dataclass(frozen=True)
class ConversationCheck:
    """Result of rendering the conversations of a file."""

    conversations: int
    lost_text: int
    """Samples of which the chat template leaves out text."""
    remarks: Mapping[str, int]
    """Samples by what `Encoder.remark_answers` says of them."""


class DataFile(Protocol):
    """The samples of one path, in the file's order."""

    @property
    def path(self) -> Path:
        """The file or the folder."""
        ...

    @property
    def unused(self) -> list[str]:
        """Lines on keys that are not used, for the summary at the start."""
        ...

    @property
    def labels(self) -> Kind | None:
        """The kind of a classification's labels."""
        ...

    @property
    def shapes(self) -> Mapping[str, int]:
        """Lines by their keys, the most frequent first."""
        ...

    def __len__(self) -> int: ...

    def hold_out(self, fraction: float) -> tuple[Self, Self]:
        """Return the training samples and the held-out ones; see `choose_held_out`.

        Raises:
            InputError: there are no two different samples.
        """
        ...

    def open_dataset(self, encoder: Encoder, task: Task, max_seq_len: int) -> Dataset:
        """Return the samples as a replica reads them.

        Raises:
            InputError: the tokenizer leaves nothing to learn, or does not fit the model.
        """
        ...

    def measure_tokens(
        self, encoder: Encoder, max_seq_len: int, budget: int | None = None
    ) -> Measurement:
        """Count the tokens.

        Args:
            budget: bytes of text to tokenise, of samples that are not encoded; None: all.
        """
        ...

    def check_conversations(self, encoder: Encoder) -> ConversationCheck:
        """Lay out each conversation.

        Raises:
            InputError: the chat template cannot express one; names its line.
        """
        ...

    def count_classes(self) -> Mapping[int, int]:
        """Return the samples of each class that has some."""
        ...

    def count_repeated(self) -> tuple[int, int]:
        """Return how many samples are as one before, and how many texts have several labels."""
        ...

    def sample_digests(self) -> Digests:
        """Return the digests of the samples."""
        ...

    def choose_examples(self, count: int) -> list[Sample]:
        """Return about so many samples, evenly spread."""
        ...
