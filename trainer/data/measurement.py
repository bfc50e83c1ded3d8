"""The tokens of samples, and what `max_seq_len` cuts of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainer.data.encoder import IGNORED, Encoder
from trainer.data.shapes import Sample
from trainer.data.truncation import encode_answers


@dataclass
class Measurement:
    """The tokens of a file's samples."""

    samples: int
    measured: int = 0
    longest: int = 0
    """Tokens of the longest measured sample, before it is cut; of a preference the longer answer's.
    """
    powers: Counter[int] = field(default_factory=Counter[int])
    """Measured samples by such tokens, as the least power of two that is not fewer."""
    cut: int = 0
    lost: int = 0
    """Tokens that are cut off."""
    unlearned: int = 0
    """Measured samples without a token to learn."""
    unknown: int = 0
    """Samples that were not measured and may be cut."""
    tokens: int = 0
    """Sum over all samples; estimated by their bytes if not all of them are measured."""

    @property
    def is_complete(self) -> bool:
        """Whether every sample was measured."""
        return self.measured == self.samples

    def add_sample(self, encoder: Encoder, sample: Sample, max_seq_len: int) -> int:
        """Measure one more sample and return its tokens.

        Raises:
            ConversationError: the chat template cannot express it.
        """
        found = [encoder.encode(answer) for answer in sample.answers]
        lengths = [len(ids) for ids, _ in found]
        self.measured += 1
        self.longest = max(self.longest, *lengths)
        self.powers[_round_up_length(max(lengths))] += 1
        if max(lengths) > max_seq_len:
            found = encode_answers(encoder, sample, max_seq_len)
            self.cut += 1
            self.lost += sum(lengths) - sum(len(ids) for ids, _ in found)
        # The first token is never a target: nothing precedes it.
        nothing = all(set(labels[1:]) <= {IGNORED} for _, labels in found)
        self.unlearned += sample.label is None and nothing
        return sum(lengths)

    def build_histogram(self) -> list[tuple[int, int]]:
        """Return how many measured samples have up to so many tokens, by powers of two."""
        first, last = min(self.powers, default=1), max(self.powers, default=0)
        limits = [1 << power for power in range(last.bit_length()) if first <= 1 << power <= last]
        return [(limit, self.powers[limit]) for limit in limits]


def _round_up_length(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def measure_samples(
    samples: Sequence[Sample],
    encoder: Encoder,
    max_seq_len: int,
    budget: int | None = None,
) -> Measurement:
    """Count the tokens of samples.

    Args:
        budget: bytes of text to tokenise; None: all. If there are more, an even part of the
            samples is measured, and of those that may be cut the longest ones.

    Raises:
        ConversationError: the chat template cannot express one.
    """
    found = Measurement(len(samples))
    sizes = [measure_size(sample) for sample in samples]
    chosen = _choose_samples(samples, sizes, encoder, max_seq_len, budget)
    done: set[int] = set()
    measured_bytes = measured_tokens = 0
    for index, typical in chosen:
        tokens = found.add_sample(encoder, samples[index], max_seq_len)
        done.add(index)
        found.tokens += tokens
        if typical:
            measured_bytes += sizes[index]
            measured_tokens += tokens
    left = (
        [index for index in range(len(samples)) if index not in done]
        if not found.is_complete
        else []
    )
    found.tokens += round(
        sum(sizes[index] for index in left) * measured_tokens / max(measured_bytes, 1)
    )
    found.unknown = sum(
        _may_be_cut(samples[index], sizes[index], encoder, max_seq_len) for index in left
    )
    return found


def _choose_samples(
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


def measure_size(sample: Sample) -> int:
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
