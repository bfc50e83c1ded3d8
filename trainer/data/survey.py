"""What the data of a run holds: a check and a summary before it, and `trainer inspect-data`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import Classes
from trainer.data.chat_marks import ConversationError
from trainer.data.encoded_rows import DataFile, EncodedFile
from trainer.data.encoder import Encoder
from trainer.data.measurement import Measurement, measure
from trainer.data.row_entry import DIGEST_TYPE
from trainer.data.shapes import Sample
from trainer.system.errors import InputError
from trainer.system.storage.progress import reported

MEASURED_BYTES = 4 << 20
"""Bytes that a start tokenises, some seconds; of more data a part, and what may be cut first."""


@dataclass(frozen=True)
class Repetitions:
    """Samples that occur again."""

    duplicates: int
    """With the same text and label as one before."""
    ambiguous: int
    """Texts with several labels."""
    shared: int
    """Validation samples that are in train, too."""


def survey(
    train: DataFile | None,
    validation: DataFile | None,
    encoder: Encoder,
    max_seq_len: int,
    classes: Classes | None,
) -> list[str]:
    """Return the lines of the summary.

    A run that learns from a teacher's logits has no `train`.
    """

    def lengths(file: DataFile) -> Iterator[str]:
        if isinstance(file, EncodedFile):
            return length_lines(file.rows.part.measurement, max_seq_len)
        found = measure(file.samples, encoder, max_seq_len, MEASURED_BYTES)
        return length_lines(found, max_seq_len)

    if train is None:
        found = lengths(validation) if validation else ()
        unused = validation.unused if validation else ()
        return [f"validation: {line}" for line in (*unused, *found)]
    held_out = 0 if validation is None else _count_samples(validation)
    lines = [
        *train.unused,
        *lengths(train),
        *class_lines(_classes_of(train, classes)),
        *repetition_lines(_repetitions_of(train, validation), held_out),
    ]
    unused = [f"validation: {line}" for line in validation.unused] if validation else []
    return [*(f"data: {line}" for line in lines), *unused]


def _count_samples(file: DataFile) -> int:
    return len(file.rows) if isinstance(file, EncodedFile) else len(file.samples)


def _classes_of(file: DataFile, classes: Classes | None) -> dict[str, int]:
    if not isinstance(file, EncodedFile):
        return count_classes(file.samples, classes)
    counts = dict(enumerate(file.rows.part.classes))
    return {name: counts.get(label, 0) for label, name in enumerate(_class_names(classes))}


def _repetitions_of(train: DataFile, validation: DataFile | None) -> Repetitions:
    if not isinstance(train, EncodedFile) and not isinstance(validation, EncodedFile):
        return find_repetitions(train.samples, validation.samples if validation else ())
    shared = 0
    if validation is not None:
        shared = int(np.isin(_digests_of(validation), _digests_of(train)).sum())
    if isinstance(train, EncodedFile):
        return Repetitions(train.rows.part.duplicates, train.rows.part.ambiguous, shared)
    return replace(find_repetitions(train.samples, ()), shared=shared)


def _digests_of(file: DataFile) -> NDArray[np.bytes_]:
    if isinstance(file, EncodedFile):
        return file.digests()
    return np.array([each.short_digest() for each in file.samples], DIGEST_TYPE)


def check_conversations(file: DataFile, encoder: Encoder) -> list[str]:
    """Check before the first step that each conversation can be laid out.

    Rows were checked when they were encoded.

    Returns:
        Lines on those of which the chat template leaves out text, if that is accepted, on the date
        that it gets, on answers that nothing ends, and on markup in them.

    Raises:
        InputError: one cannot; names its line.
    """
    if isinstance(file, EncodedFile):
        part = file.rows.part
        given = part.samples, part.conversations, part.lost_text, part.markup
        return _conversation_lines(encoder, *given)
    lost, markup = 0, Counter[str]()
    with reported(f"checking {file.path.name}", len(file.samples)) as progress:
        for sample in file.samples:
            progress.advance()
            if sample.messages:
                try:
                    lost += sum(encoder.check(answer) is not None for answer in sample.answers) > 0
                    markup.update(set(filter(None, map(encoder.plain_markup, sample.answers))))
                except ConversationError as error:
                    raise InputError(f"{file.place(sample)}: {error}") from None
    conversations = sum(1 for one in file.samples if one.messages)
    return _conversation_lines(encoder, len(file.samples), conversations, lost, markup)


def _conversation_lines(
    encoder: Encoder, samples: int, conversations: int, lost: int, markup: Mapping[str, int]
) -> list[str]:
    lines = list[str]()
    if conversations:
        if encoder.template and encoder.template.date:
            lines.append(
                "data: the chat template asks for the date, which is"
                f" {encoder.template.date} on any day (data.date)"
            )
        if not encoder.ends_answers:
            lines.append(
                "data: nothing ends an answer in the chat template, so the model does not learn to"
                " stop; write the tokenizer's end token after it ({{ eos_token }})"
            )
    lines += (
        f"data: {_count(count, 'sample')} {'has' if count == 1 else 'have'} the special token"
        f" {token} in an answer's text, where it is learned as plain text"
        for token, count in markup.items()
    )
    if lost:
        lines.append(
            f"data: the chat template leaves out text of {lost:,} of"
            f" {_count(samples, 'sample')}, which data.lost_text accepts"
        )
    return lines


def length_lines(found: Measurement, max_seq_len: int) -> Iterator[str]:
    """Yield how many tokens there are, and how many are cut."""
    measured = "" if found.complete else f" ({len(found.lengths):,} samples measured)"
    about = "" if found.complete else "about "
    yield (
        f"{_count(found.samples, 'sample')}, {about}{found.tokens:,} tokens{measured}, the longest"
        f" has {max(found.lengths):,}"
    )
    least = "at least " if found.unknown else ""
    if found.cut:
        yield (
            f"{least}{_count(found.cut, 'sample')} {_are(found.cut)} longer than max_seq_len"
            f" {max_seq_len} and cut: {least}{_count(found.lost, 'token')}"
            f" ({100 * found.lost / found.tokens:.1f} %) {_are(found.lost)} lost"
        )
    if found.unlearned:
        has = "has" if found.unlearned == 1 else "have"
        many = "at least " if not found.complete else ""
        yield f"{many}{_count(found.unlearned, 'sample')} {has} no token to learn"
    if found.unknown:
        yield (
            f"{_count(found.unknown, 'sample')} that may be cut {_are(found.unknown)} not measured;"
            " trainer inspect-data measures all"
        )


def count_classes(samples: Sequence[Sample], classes: Classes | None) -> dict[str, int]:
    """Return the samples of each class, by its name or its number."""
    counts = Counter(sample.label for sample in samples)
    return {name: counts[label] for label, name in enumerate(_class_names(classes))}


def _class_names(classes: Classes | None) -> tuple[str, ...]:
    if classes is None:
        return ()
    return classes if isinstance(classes, tuple) else tuple(map(str, range(classes)))


def class_lines(counts: dict[str, int]) -> Iterator[str]:
    """Yield how many samples each class has, and names that are nearly the same."""
    if not counts:
        return
    shown = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    absent = ", ".join(name for name, count in counts.items() if not count)
    yield f"samples of each class: {shown}" + (f"; none of {absent}" if absent else "")
    alike = defaultdict[str, list[str]](list)
    for name in counts:
        alike[name.casefold().strip()].append(repr(name))
    for names in alike.values():
        if len(names) > 1:
            yield f"classes that differ only in case or white space: {', '.join(names)}"


def find_repetitions(samples: Sequence[Sample], validation: Sequence[Sample]) -> Repetitions:
    """Compare all samples of a run by their texts."""
    first: dict[bytes, int | None] = {}
    again: dict[bytes, set[int | None]] = {}  # the labels of a text that occurs again
    duplicates = 0
    for sample in samples:
        digest = sample.digest()
        if digest not in first:
            first[digest] = sample.label
            continue
        labels = again.setdefault(digest, {first[digest]})
        duplicates += sample.label in labels
        labels.add(sample.label)
    return Repetitions(
        duplicates,
        sum(len(labels) > 1 for labels in again.values()),
        sum(sample.digest() in first for sample in validation),
    )


def repetition_lines(found: Repetitions, validation: int) -> Iterator[str]:
    """Yield what occurs again, of so many validation samples."""
    again = [_count(found.duplicates, "duplicate sample")] if found.duplicates else []
    if found.ambiguous:
        again.append(f"{_count(found.ambiguous, 'text')} with several labels")
    if again:
        yield ", ".join(again)
    if found.shared:
        yield (
            f"{found.shared:,} of {_count(validation, 'validation sample')} {_are(found.shared)}"
            " also in train, so validation is too optimistic"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
