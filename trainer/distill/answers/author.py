"""Continues prompts with a language model, and reads texts and scores of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from trainer.data.encoded_rows import EncodedRows, open_encoded
from trainer.data.encoder import Encoder
from trainer.data.prompts import encode_prompts, turns_before
from trainer.data.row_entry import NEVER_CUT, RowSettings
from trainer.data.samples import read_prompts
from trainer.data.shapes import Sample
from trainer.data.text_stream import INCOMPLETE, TextStream
from trainer.distill.answers.answer import Answer
from trainer.replica.continuation import Until
from trainer.replica.sampling import Sampling, ScoredSampling

log = logging.getLogger(__name__)

_TELL = 64
"""New tokens between two reports."""


class Generate(Protocol):
    """Continues prompts, as a `Generator` of `trainer.evaluate.generation` does."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        until: Until | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt."""
        ...


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts of a file, as one model's tokenizer lays them out."""

    encoder: Encoder
    samples: Sequence[Sample]
    tokens: Sequence[Sequence[int]]

    @classmethod
    def read_prompts(cls, path: Path, columns: Mapping[str, str], model_dir: Path) -> Prompts:
        """Read a file.

        Raises:
            DataError, InputError: the file cannot be used, or a prompt has no token or has tools.
        """
        encoder = Encoder(model_dir)
        settings = RowSettings("causal-lm", None, columns, NEVER_CUT, prompts=True)
        if file := open_encoded(path, settings, encoder):
            for line in file.unused:
                log.info("%s", line)
            return cls(encoder, PromptSamples(file.rows), PromptTokens(file.rows))
        samples = read_prompts(path, columns)
        for sample in samples:
            turns_before(sample)
        return cls(encoder, samples, encode_prompts(encoder, model_dir, samples))

    @property
    def longest(self) -> int:
        """The number of the longest prompt."""
        return max(range(len(self.tokens)), key=lambda number: len(self.tokens[number]))


class PromptTokens(Sequence[Sequence[int]]):
    """The tokens of prompts that are encoded rows, each read when it is used."""

    def __init__(self, rows: EncodedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sequence[int]:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        return self._rows[index].input_ids.tolist()


class PromptSamples(Sequence[Sample]):
    """The samples of such prompts."""

    def __init__(self, rows: EncodedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        return self._rows.read_prompt(index)


class AnswerSlot(NamedTuple):
    """An answer that is to be written."""

    document: int
    sample: int
    prompt: int
    """The number of its prompt."""
    number: int
    """On which its draws depend, with the seed and nothing else."""


class Author:
    """Writes answers to prompts.

    The draws of an answer depend on the seed and its number alone: neither batches nor shards nor
    an interruption changes them.

    Args:
        stops: texts that end an answer, beside the model's own end.
    """

    def __init__(
        self,
        generate: Generate,
        prompts: Prompts,
        sampling: Sampling,
        max_new_tokens: int,
        stops: Sequence[str] = (),
    ) -> None:
        self._generate, self._prompts, self._sampling = generate, prompts, sampling
        self._max_new_tokens, self._stops = max_new_tokens, stops

    def write_answers(
        self, places: Sequence[AnswerSlot], on_tokens: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """Return answers, in the order of their places.

        Args:
            on_tokens: called now and then with the number of new tokens; may raise to stop.

        Raises:
            NonFiniteError: the model computes NaN or Inf.
            InputError: not even one prompt fits into the device's memory.
        """
        # No text has a token that only the model has, and no teacher could score it.
        known = self._prompts.encoder.largest + 1
        numbers = [place.number for place in places]
        sampling = ScoredSampling(**asdict(self._sampling), numbers=numbers, vocabulary=known)
        streams = [self._open_stream(place) for place in places]
        untold = 0

        def should_stop(row: int, tokens: Sequence[int]) -> bool:
            nonlocal untold
            untold += 1
            if untold == _TELL:
                untold = 0
                on_tokens(_TELL)
            if not streams[row].markers:
                return False
            if len(tokens) == 1:  # a batch that did not fit begins again
                streams[row] = self._open_stream(places[row])
            streams[row].push(tokens)
            return streams[row].ended

        made = self._generate(
            [self._prompts.tokens[place.prompt] for place in places],
            max_new_tokens=self._max_new_tokens,
            sampling=sampling,
            stop=self._prompts.encoder.stops,
            until=should_stop,
        )
        on_tokens(untold)
        return [
            self._make_answer(place, new, [sampling.logprobs[row, at] for at in range(len(new))])
            for row, (place, new) in enumerate(zip(places, made, strict=True))
        ]

    def _make_answer(
        self, place: AnswerSlot, new: Sequence[int], scores: Sequence[float]
    ) -> Answer:
        stopped = new[-1] in self._prompts.encoder.stops
        stream = self._open_stream(place)
        stream.finish(new[:-1] if stopped else new)
        ended = stopped or stream.ended
        asked = self._prompts.tokens[place.prompt]
        return Answer(
            document=place.document,
            sample=place.sample,
            prompt=turns_before(self._prompts.samples[place.prompt]),
            text=stream.text if ended else stream.text.rstrip(INCOMPLETE),
            tokens=np.array([*asked, *new], np.int32),
            prompt_length=len(asked),
            logprobs=np.array(scores, np.float32),
            ended=ended,
        )

    def _open_stream(self, place: AnswerSlot) -> TextStream:
        prompts, number = self._prompts, place.prompt
        sample, tokens = prompts.samples[number], prompts.tokens[number]
        return prompts.encoder.answer_stream(sample, tokens, self._stops)
