"""Survey of a run's data: a check and a summary before it, and `trainer inspect-data`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.run import Classes
from trainer.data.data_file import DataFile
from trainer.data.digests import count_shared
from trainer.data.encoder import Encoder
from trainer.data.measurement import Measurement

MEASURED_BYTES = 4 << 20
"""Bytes that a start tokenises, some seconds; of more data a part, and what may be cut first."""


@dataclass(frozen=True)
class Repetitions:
    """Samples that occur again."""

    duplicates: int
    """With the same text and label as one before."""
    ambiguous: int
    """Texts with several labels."""
    in_both: int
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

    def measure_lengths(file: DataFile) -> Iterator[str]:
        return describe_lengths(
            file.measure_tokens(encoder, max_seq_len, MEASURED_BYTES), max_seq_len
        )

    if train is None:
        found = measure_lengths(validation) if validation else ()
        unused = validation.unused if validation else ()
        return [f"validation: {line}" for line in (*unused, *found)]
    held_out = 0 if validation is None else len(validation)
    lines = [
        *train.unused,
        *measure_lengths(train),
        *describe_classes(count_classes(train, classes)),
        *describe_repetitions(find_repetitions(train, validation), held_out),
    ]
    unused = [f"validation: {line}" for line in validation.unused] if validation else []
    return [*(f"data: {line}" for line in lines), *unused]


def check_conversations(file: DataFile, encoder: Encoder) -> list[str]:
    """Check before the first step that each conversation can be laid out.

    Returns:
        Lines on those of which the chat template leaves out text, if that is accepted, on the date
        that it gets, on answers and calls that nothing ends, and on markup in them.

    Raises:
        InputError: one cannot; names its line.
    """
    found = file.check_conversations(encoder)
    lines = list[str]()
    if found.conversations:
        if encoder.template and encoder.template.date:
            lines.append(
                "data: the chat template asks for the date, which is"
                f" {encoder.template.date} on any day (data.date)"
            )
        if not encoder.ends_answers:
            lines.append(
                "data: the chat template does not end answers, so the model does not learn to"
                " stop; write the tokenizer's end token after it ({{ eos_token }})"
            )
    lines += (
        f"data: {_count(count, 'sample')} {'has' if count == 1 else 'have'} {remark}"
        for remark, count in found.remarks.items()
    )
    if found.lost_text:
        lines.append(
            f"data: the chat template leaves out text of {found.lost_text:,} of"
            f" {_count(len(file), 'sample')}, which data.lost_text accepts"
        )
    return lines


def describe_lengths(found: Measurement, max_seq_len: int) -> Iterator[str]:
    """Yield how many tokens there are, and how many are cut."""
    measured = "" if found.is_complete else f" ({found.measured:,} samples measured)"
    about = "" if found.is_complete else "about "
    yield (
        f"{_count(found.samples, 'sample')}, {about}{found.tokens:,} tokens{measured}, the longest"
        f" has {found.longest:,}"
    )
    least = "at least " if found.unknown else ""
    if found.cut:
        yield (
            f"{least}{_count(found.cut, 'sample')} {_is_or_are(found.cut)} longer than max_seq_len"
            f" {max_seq_len} and cut: {least}{_count(found.lost, 'token')}"
            f" ({100 * found.lost / found.tokens:.1f} %) {_is_or_are(found.lost)} lost"
        )
    if found.unlearned:
        has = "has" if found.unlearned == 1 else "have"
        many = "at least " if not found.is_complete else ""
        yield f"{many}{_count(found.unlearned, 'sample')} {has} no token to learn"
    if found.unknown:
        yield (
            f"{_count(found.unknown, 'sample')} that may be cut {_is_or_are(found.unknown)} not"
            " measured; trainer inspect-data measures all"
        )


def count_classes(file: DataFile, classes: Classes | None) -> dict[str, int]:
    """Return the samples of each class, by its name or its number."""
    if classes is None:
        return {}
    names = classes if isinstance(classes, tuple) else tuple(map(str, range(classes)))
    counts = file.count_classes()
    return {name: counts.get(label, 0) for label, name in enumerate(names)}


def describe_classes(counts: dict[str, int]) -> Iterator[str]:
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


def find_repetitions(train: DataFile, validation: DataFile | None) -> Repetitions:
    """Compare all samples of a run by their texts."""
    shared = (
        0 if validation is None else count_shared(train.sample_digests, validation.sample_digests())
    )
    return Repetitions(*train.count_repeated(), shared)


def describe_repetitions(found: Repetitions, validation: int) -> Iterator[str]:
    """Yield what occurs again, of so many validation samples."""
    again = [_count(found.duplicates, "duplicate sample")] if found.duplicates else []
    if found.ambiguous:
        again.append(f"{_count(found.ambiguous, 'text')} with several labels")
    if again:
        yield ", ".join(again)
    if found.in_both:
        yield (
            f"{found.in_both:,} of {_count(validation, 'validation sample')}"
            f" {_is_or_are(found.in_both)} also in train, so validation is too optimistic"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _is_or_are(number: int) -> str:
    return "is" if number == 1 else "are"
