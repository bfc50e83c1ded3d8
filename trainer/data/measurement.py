"""The tokens of samples, and what `max_seq_len` cuts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.data.encoder import IGNORED, Encoder
from trainer.data.fitting import encode_answers
from trainer.data.shapes import Sample


@dataclass
class Measurement:
    """The tokens of a file's samples."""

    samples: int
    lengths: list[int] = field(default_factory=list[int])
    """Of the measured samples, before they are cut; of a preference the longer answer's."""
    cut: int = 0
    lost: int = 0
    """Tokens that are cut off."""
    unlearned: int = 0
    """Measured samples without a token to learn."""
    unknown: int = 0
    """Samples that were not measured and may be cut."""
    tokens: int = 0
    """Of all samples; estimated by their bytes if not all of them are measured."""
    whole: bool = False
    """Whether all are measured though `lengths` has the longest alone."""

    @property
    def complete(self) -> bool:
        """Whether every sample was measured."""
        return self.whole or len(self.lengths) == self.samples

    def add(self, encoder: Encoder, sample: Sample, max_seq_len: int) -> int:
        """Measure one more sample and return its tokens.

        Raises:
            ConversationError: the chat template cannot express it.
        """
        found = [encoder.encode(answer) for answer in sample.answers]
        lengths = [len(ids) for ids, _ in found]
        self.lengths.append(max(lengths))
        if max(lengths) > max_seq_len:
            found = encode_answers(encoder, sample, max_seq_len)
            self.cut += 1
            self.lost += sum(lengths) - sum(len(ids) for ids, _ in found)
        # The first token is never a target: nothing precedes it.
        nothing = all(set(labels[1:]) <= {IGNORED} for _, labels in found)
        self.unlearned += sample.label is None and nothing
        return sum(lengths)

    def histogram(self) -> list[tuple[int, int]]:
        """Return how many measured samples have up to so many tokens, by powers of two."""
        counts: dict[int, int] = {}
        for length in self.lengths:
            limit = 1 << max(length - 1, 0).bit_length()
            counts[limit] = counts.get(limit, 0) + 1
        first, last = min(counts, default=1), max(counts, default=0)
        limits = [1 << power for power in range(last.bit_length()) if first <= 1 << power <= last]
        return [(limit, counts.get(limit, 0)) for limit in limits]


def measure(
    samples: Sequence[Sample],
    encoder: Encoder,
    max_seq_len: int,
    budget: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Measurement:
    """Count the tokens of samples.

    Args:
        budget: bytes of text to tokenise; None: all. If there are more, an even part of the
            samples is measured, and of those that may be cut the longest ones.
        on_progress: called with each number of samples that are done.

    Raises:
        ConversationError: the chat template cannot express one.
    """
    found = Measurement(len(samples))
    sizes = [size_of(sample) for sample in samples]
    chosen = _chosen(samples, sizes, encoder, max_seq_len, budget)
    done: set[int] = set()
    measured_bytes = measured_tokens = 0
    for number, (index, typical) in enumerate(chosen):
        tokens = found.add(encoder, samples[index], max_seq_len)
        done.add(index)
        found.tokens += tokens
        if typical:
            measured_bytes += sizes[index]
            measured_tokens += tokens
        if on_progress is not None:
            on_progress(number + 1)
    left = (
        [index for index in range(len(samples)) if index not in done] if not found.complete else []
    )
    found.tokens += round(
        sum(sizes[index] for index in left) * measured_tokens / max(measured_bytes, 1)
    )
    found.unknown = sum(
        _may_be_cut(samples[index], sizes[index], encoder, max_seq_len) for index in left
    )
    return found


def _chosen(
    samples: Sequence[Sample],
    sizes: Sequence[int],
    encoder: Encoder,
    max_seq_len: int,
    budget: int | None,
) -> Iterator[tuple[int, bool]]:
    """Yield the samples to measure, and whether each is of an even part of them."""
    total = sum(sizes)
    if budget is None or total <= budget:
        yield from ((index, True) for index in range(len(samples)))
        return
    step, spent = -(-2 * total // budget), 0
    taken: set[int] = set()
    for index in range(0, len(samples), step):
        if not spent or spent + sizes[index] <= budget // 2:
            spent += sizes[index]
            taken.add(index)
            yield index, True
    by_size = sorted(range(len(samples)), key=lambda index: -sizes[index])
    for place, index in enumerate(by_size):
        if not _may_be_cut(samples[index], sizes[index], encoder, max_seq_len) or (
            place and spent + sizes[index] > budget
        ):
            continue
        if index not in taken:
            spent += sizes[index]
            yield index, False


def size_of(sample: Sample) -> int:
    """Return the bytes of a sample's text."""
    size = 0
    for answer in sample.answers:
        turns = sum(len(message.content.encode()) for message in answer.messages)
        size += len(answer.prompt.encode()) + len(answer.text.encode()) + turns
    return size


def _may_be_cut(sample: Sample, size: int, encoder: Encoder, max_seq_len: int) -> bool:
    """Whether a sample may have more tokens than `max_seq_len`, by its bytes alone.

    A token is at least a byte of text that nothing normalises. A chat template adds text.
    """
    if sample.messages or encoder.tokenizer.normalizer is not None:
        return True
    return size + len(encoder.prefix) + 1 > max_seq_len  # and the end of the text
