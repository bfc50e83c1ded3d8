"""The report of `trainer inspect-data` on a data file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from trainer.config.run import RunConfig
from trainer.data.encoded_rows import read_data
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.measurement import Measurement
from trainer.data.shapes import Sample
from trainer.data.survey import (
    Repetitions,
    check_conversations,
    count_classes,
    describe_classes,
    describe_lengths,
    describe_repetitions,
    find_repetitions,
)
from trainer.data.text_stream import TextStream
from trainer.data.truncation import encode_answers


@dataclass(frozen=True)
class Span:
    """Tokens of a sample in a row."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Example:
    """A sample as the model sees it."""

    location: str
    spans: list[Span]
    label: str | None
    """The class, by its name or its number."""


@dataclass(frozen=True)
class Inspection:
    """Contents of a file."""

    task: str
    samples: int
    shapes: dict[str, int]
    """Lines by their keys."""
    classes: dict[str, int]
    """Samples of each class of a classification."""
    unused: list[str]
    """Lines on keys, and on text, that are not used."""
    max_seq_len: int
    measurement: Measurement | None
    """None without a model."""
    repetitions: Repetitions
    validation: int
    """Validation samples."""
    examples: list[Example]

    def iter_lines(self) -> Iterator[str]:
        """Yield what the start of a run says, and the shapes."""
        yield f"task {self.task}"
        shapes = (f"{spelled} {count:,}" for spelled, count in self.shapes.items())
        yield f"lines of each shape: {', '.join(shapes)}"
        if self.measurement is None:
            yield f"{self.samples:,} samples; their tokens need --model"
        else:
            yield from describe_lengths(self.measurement, self.max_seq_len)
        yield from describe_classes(self.classes)
        yield from describe_repetitions(self.repetitions, self.validation)
        yield from self.unused

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        found = self.measurement
        tokens: dict[str, Any] | None = None
        if found is not None:
            tokens = {
                "total": found.tokens,
                "longest": found.longest,
                "histogram": [list(each) for each in found.build_histogram()],
                "max_seq_len": self.max_seq_len,
                "cut_samples": found.cut,
                "cut_tokens": found.lost,
                "unlearned_samples": found.unlearned,
            }
        return {
            "schema": "motley.data/2",
            "task": self.task,
            "samples": self.samples,
            "shapes": self.shapes,
            "classes": self.classes or None,
            "tokens": tokens,
            **asdict(self.repetitions),
            "validation_samples": self.validation,
            "unused": self.unused,
            "examples": [asdict(example) for example in self.examples],
        }


def inspect_data(config: RunConfig, encoder: Encoder | None, examples: int) -> Inspection:
    """Return what the data of a config holds; every training sample is measured.

    Args:
        encoder: the model's; None leaves the tokens out.
        examples: how many samples to show.

    Raises:
        DataError, InputError: a file cannot be read.
    """
    classes, limit = config.classes, config.data.max_seq_len
    file = read_data(config.data.train, config, encoder)
    assert file is not None
    other = read_data(config.data.validation, config, encoder)
    lost = check_conversations(file, encoder) if encoder else []
    names = count_classes(file, classes)
    return Inspection(
        task=config.task,
        samples=len(file),
        shapes=dict(file.shapes),
        classes=names,
        unused=[*file.unused, *lost],
        max_seq_len=limit,
        measurement=file.measure_tokens(encoder, limit) if encoder else None,
        repetitions=find_repetitions(file, other),
        validation=len(other or ()),
        examples=[
            Example(
                sample.place(file.path),
                list(_iter_spans(sample, encoder, limit)),
                None if sample.label is None else [*names][sample.label],
            )
            for sample in file.choose_examples(examples)
        ],
    )


def _iter_spans(sample: Sample, encoder: Encoder | None, limit: int) -> Iterator[Span]:
    """Yield a sample's tokens as text, or its text without a tokenizer."""
    if encoder is None:
        for answer in sample.answers:
            if answer.prompt:
                yield Span(answer.prompt, learned=False)
            for turn in answer.messages:
                yield Span(f"{turn.role}: {turn.content}\n", learned=turn.target)
            if answer.text:
                yield Span(answer.text, learned=answer.label is None)
        return
    known = sample.label is None
    for ids, labels in encode_answers(encoder, sample, limit):
        learned = [known and place > 0 and label != IGNORED for place, label in enumerate(labels)]
        begin = 0
        for is_learned, run in groupby(learned):
            end = begin + len(list(run))
            text = TextStream(encoder.tokenizer, ids[:begin]).finish(ids[begin:end])
            begin = end
            yield Span(text, learned=is_learned)
