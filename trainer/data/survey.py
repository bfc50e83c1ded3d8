"""A check and a summary of a run's data, logged before the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from trainer.config.run import Classes
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.fitting import encode_within
from trainer.data.samples import SampleFile
from trainer.data.shapes import Sample
from trainer.system.errors import InputError

MEASURED_BYTES = 2 << 20
"""Bytes to tokenise, one second; of more data an even part is, and the figures say `about`."""


def survey(
    train: SampleFile | None,
    validation: SampleFile | None,
    encoder: Encoder,
    max_seq_len: int,
    classes: Classes | None,
) -> list[str]:
    """Return the lines of the summary.

    A run that learns from a teacher's logits has no `train`.
    """
    if train is None:
        found = _lengths(validation.samples, encoder, max_seq_len) if validation else ()
        unused = validation.unused if validation else ()
        return [f"validation: {line}" for line in (*unused, *found)]
    lines = [
        *train.unused,
        *_lengths(train.samples, encoder, max_seq_len),
        *_classes(train.samples, classes),
        *_repeated(train.samples, validation.samples if validation else ()),
    ]
    unused = [f"validation: {line}" for line in validation.unused] if validation else []
    return [*(f"data: {line}" for line in lines), *unused]


def check_conversations(file: SampleFile, encoder: Encoder) -> list[str]:
    """Check before the first step that each conversation can be laid out.

    Returns:
        A line on those of which the chat template leaves out text, if that is accepted.

    Raises:
        InputError: one cannot; names its line.
    """
    lost = 0
    for sample in file.samples:
        if sample.messages:
            try:
                lost += encoder.check(sample) is not None
            except ConversationError as error:
                raise InputError(f"{file.place(sample)}: {error}") from None
    if not lost:
        return []
    return [
        f"data: the chat template leaves out text of {lost:,} of"
        f" {_count(len(file.samples), 'sample')}, which data.lost_text accepts"
    ]


def _lengths(samples: Sequence[Sample], encoder: Encoder, max_seq_len: int) -> Iterator[str]:
    size = sum(map(_size, samples))
    step = -(-size // MEASURED_BYTES)
    part = samples[::step]
    lengths: list[int] = []
    cut: list[int] = []  # the tokens that each sample above the limit loses
    unlearned = 0
    for sample in part:
        ids, labels = encoder.encode(sample)
        lengths.append(len(ids))
        if len(ids) > max_seq_len:
            kept, labels = encode_within(encoder, sample, max_seq_len)
            cut.append(len(ids) - len(kept))
        # The first token is never a target: nothing precedes it.
        unlearned += sample.label is None and set(labels[1:]) <= {IGNORED}
    scale, about = len(samples) / len(part), "about " if step > 1 else ""
    tokens = round(sum(lengths) * scale)
    measured = f" ({len(part):,} samples measured)" if step > 1 else ""
    yield (
        f"{_count(len(samples), 'sample')}, {about}{tokens:,} tokens{measured}, the longest has"
        f" {max(lengths):,}"
    )
    if cut:
        count, lost = round(len(cut) * scale), round(sum(cut) * scale)
        yield (
            f"{about}{_count(count, 'sample')} {_are(count)} longer than max_seq_len {max_seq_len}"
            f" and cut: {about}{_count(lost, 'token')} ({100 * sum(cut) / sum(lengths):.1f} %)"
            f" {_are(lost)} lost"
            + (f"; {round(unlearned * scale):,} without a token to learn" if unlearned else "")
        )


def _classes(samples: Sequence[Sample], classes: Classes | None) -> Iterator[str]:
    if classes is None:
        return
    names = classes if isinstance(classes, tuple) else tuple(map(str, range(classes)))
    counts = Counter(sample.label for sample in samples)
    shown = ", ".join(f"{name} {counts[label]:,}" for label, name in enumerate(names))
    absent = ", ".join(name for label, name in enumerate(names) if not counts[label])
    yield f"samples of each class: {shown}" + (f"; none of {absent}" if absent else "")
    alike = defaultdict[str, list[str]](list)
    for name in names:
        alike[name.casefold().strip()].append(name)
    for same in alike.values():
        if len(same) > 1:
            yield f"classes that differ only in case or white space: {', '.join(map(repr, same))}"


def _repeated(samples: Sequence[Sample], validation: Sequence[Sample]) -> Iterator[str]:
    said: dict[bytes, set[int | None]] = {}
    again = 0
    for sample in samples:
        labels = said.setdefault(sample.digest(), set())
        again += sample.label in labels
        labels.add(sample.label)
    several = sum(len(labels) > 1 for labels in said.values())
    found = [_count(again, "duplicate sample")] if again else []
    if several:
        found.append(f"{_count(several, 'text')} with several labels")
    if found:
        yield ", ".join(found)
    shared = sum(sample.digest() in said for sample in validation)
    if shared:
        yield (
            f"{shared:,} of {_count(len(validation), 'validation sample')} {_are(shared)} also in"
            " train, so validation is too optimistic"
        )


def _size(sample: Sample) -> int:
    turns = sum(len(message.content) for message in sample.messages)
    return len(sample.prompt) + len(sample.text) + turns


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
