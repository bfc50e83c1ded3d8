"""A data file whose samples are in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trainer.config.run import Task
from trainer.data.chat_marks import ConversationError
from trainer.data.data_file import ConversationCheck
from trainer.data.digests import DIGEST_TYPE, Digests, choose_held_out, count_repeated
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.labels import Kind
from trainer.data.measurement import Measurement, measure_samples
from trainer.data.sample import Sample
from trainer.data.tokens import Dataset
from trainer.system.errors import InputError
from trainer.system.storage.progress import report_progress


@dataclass(frozen=True)
class SampleFile:
    """All samples of one file; see `DataFile`."""

    path: Path
    samples: list[Sample]
    unused: list[str]
    labels: Kind | None = None
    shapes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __len__(self) -> int:
        return len(self.samples)

    def hold_out(self, fraction: float) -> tuple[SampleFile, SampleFile]:
        """Return the training samples and the held-out ones."""
        held = choose_held_out(np.concatenate(list(self.sample_digests())), fraction)
        if held is None:
            raise InputError(
                f"{self.path}: has only one distinct sample, so none can be held out; give a"
                " validation file, or data.validation_fraction 0"
            )
        pairs = list(zip(self.samples, held, strict=True))
        train = [sample for sample, is_held in pairs if not is_held]
        validation = [sample for sample, is_held in pairs if is_held]
        return replace(self, samples=train), replace(self, samples=validation, unused=[])

    def open_dataset(self, encoder: Encoder, task: Task, max_seq_len: int) -> Dataset:
        """Return the samples as a replica reads them, each encoded on first use.

        Conversations are cut to `max_seq_len` tokens as `truncation.py` says, other samples to
        their first ones. A `causal-lm` text ends with the tokenizer's end-of-text token if it
        has one; the chat template lays out conversations.
        """
        assert max_seq_len > 0
        dataset = Dataset(self.path, self.samples, encoder, max_seq_len)
        if encoder.known is not None and encoder.largest >= encoder.known:
            for index in range(len(dataset)):  # now, not during the run
                dataset[index]
        rows = (dataset[index] for index in range(len(dataset)))
        if task != "classify" and not any(
            np.any(each.labels != IGNORED) for row in rows for each in row.answers
        ):
            raise InputError(
                f"{self.path}: no token is left to learn from within max_seq_len {max_seq_len},"
                " raise it"
            )
        return dataset

    def measure_tokens(
        self, encoder: Encoder, max_seq_len: int, budget: int | None = None
    ) -> Measurement:
        """Count the tokens."""
        return measure_samples(self.samples, encoder, max_seq_len, budget)

    def check_conversations(self, encoder: Encoder) -> ConversationCheck:
        """Lay out each conversation."""
        lost, conversations, remarks = 0, 0, Counter[str]()
        with report_progress(f"checking {self.path.name}", len(self.samples)) as progress:
            for sample in self.samples:
                progress.advance()
                if not sample.messages:
                    continue
                conversations += 1
                try:
                    lost += any(
                        encoder.check_conversation(answer) is not None for answer in sample.answers
                    )
                    remarks.update(set(filter(None, map(encoder.remark_answers, sample.answers))))
                except ConversationError as error:
                    raise InputError(f"{sample.place(self.path)}: {error}") from None
        return ConversationCheck(conversations, lost, remarks)

    def count_classes(self) -> Mapping[int, int]:
        """Return the samples of each class that has some."""
        return Counter(each.label for each in self.samples if each.label is not None)

    def count_repeated(self) -> tuple[int, int]:
        """Return how many samples are as one before, and how many texts have several labels."""
        labels = [-1 if each.label is None else each.label for each in self.samples]
        return count_repeated(
            np.concatenate(list(self.sample_digests())), np.array(labels, np.int64)
        )

    def sample_digests(self) -> Digests:
        """Return the digests of the samples."""
        return [np.array([each.digest() for each in self.samples], "S32").astype(DIGEST_TYPE)]

    def choose_examples(self, count: int) -> list[Sample]:
        """Return about so many samples, evenly spread."""
        return self.samples[:: max(1, len(self.samples) // max(count, 1))][:count]
