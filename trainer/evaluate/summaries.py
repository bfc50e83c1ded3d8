"""Score a model's minutes against reference minutes: ROUGE-L and action items.

ROUGE-L (Lin 2004) is the F-measure of the longest common subsequence of words, here lower-case and
without punctuation, not stemmed: the values of google-research's `rouge_score` for English. An
action item is found if owner and task are the reference's, letter case and punctuation aside.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import Encoder
from trainer.data.fitting import fit
from trainer.data.formats import read_records
from trainer.data.meetings.minutes import ActionItem, find_action_items
from trainer.data.records import Problems
from trainer.data.samples import check_columns
from trainer.data.shapes import Sample, parse_sample
from trainer.data.values import BadLineError
from trainer.system.errors import InputError

RESAMPLES = 1000
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Reference:
    """A conversation and the expected contents of its last answer."""

    sample: Sample
    place: str
    """`file:line`."""
    action_items: Sequence[ActionItem]

    @property
    def answer(self) -> str:
        """The last answer, which a person wrote."""
        return self.sample.messages[-1].content


@dataclass(frozen=True)
class Score:
    """One answer against its reference."""

    rouge_l: float
    matched: int
    """Action items of both."""
    wanted: int
    """Action items of the reference."""
    written: int


def read_references(path: Path, columns: Mapping[str, str] | None = None) -> list[Reference]:
    """Return the conversations of a data file.

    Action items are those of the key `action_items`, without it those that the answer lists.

    Raises:
        InputError: a line is no conversation that ends with an answer, or cannot be read.
    """
    check_columns(columns)
    problems = Problems()
    references: list[Reference] = []
    for record in read_records(path, problems, columns):
        place = record.place
        try:
            sample = parse_sample(record.tree, record.number)
        except BadLineError as error:
            problems.add(place, error)
            continue
        if not sample.messages or sample.messages[-1].role != "assistant":
            raise InputError(f"{place}: has no answer at its end to compare with")
        given = record.tree.get("action_items")
        if given is None:
            items = find_action_items(sample.messages[-1].content)
        else:
            items = _items(given, place)
        references.append(Reference(sample, place, items))
    problems.check()
    if not references:
        raise InputError(f"{path}: holds no samples")
    return references


def shortened(references: Sequence[Reference], encoder: Encoder, limit: int) -> list[Sample]:
    """Return the conversations with prompts of at most `limit` tokens, cut as in training.

    Raises:
        InputError: one cannot be cut so far, or the chat template cannot express it.
    """
    fitted: list[Sample] = []
    for reference in references:
        try:
            sample = fit(reference.sample, lambda shorter: len(encoder.prompt(shorter)), limit)
        except ConversationError as error:
            raise InputError(f"{reference.place}: {error}") from None
        if sample is None:
            raise InputError(
                f"{reference.place}: cannot be cut to a prompt of {limit} tokens; raise"
                " --max-seq-len or lower --max-new-tokens"
            )
        fitted.append(sample)
    return fitted


def compare(answer: str, reference: Reference) -> Score:
    """Score one answer."""
    wanted, written = map(_counted, (reference.action_items, find_action_items(answer)))
    return Score(
        rouge_l(answer, reference.answer),
        (wanted & written).total(),
        wanted.total(),
        written.total(),
    )


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L, in [0, 1]."""
    from rapidfuzz.distance import LCSseq  # only this task needs it

    one, other = (_WORD.findall(text.casefold()) for text in (answer, reference))
    common = LCSseq.similarity(one, other)
    return 2 * common / (len(one) + len(other)) if common else 0.0


def figures(scores: Sequence[Score]) -> dict[str, float]:
    """Return means with the ends of their 95 % intervals, `NAME_low` and `NAME_high`.

    `action_items_found` is the share of the references' action items, `action_items_right` that of
    the written ones; a figure about no item at all is left out. The intervals are percentiles of
    1,000 bootstrap resamples of the conversations, drawn from a fixed seed.
    """
    parts = np.array([(s.rouge_l, 1, s.matched, s.wanted, s.written) for s in scores], np.float64)
    draws = np.random.default_rng(0).integers(len(parts), size=(RESAMPLES, len(parts)))
    sums = np.vstack([parts.sum(axis=0), *(parts[draw].sum(axis=0) for draw in draws)])
    found: dict[str, float] = {}
    for name, above, below in (
        ("rouge_l", 0, 1),
        ("action_items_found", 2, 3),
        ("action_items_right", 2, 4),
    ):
        defined = sums[sums[:, below] > 0]
        if not sums[0, below]:
            continue
        values = defined[:, above] / defined[:, below]
        low, high = np.percentile(values[1:], (2.5, 97.5)) if len(values) > 1 else values[[0, 0]]
        found |= {name: float(values[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def _counted(items: Sequence[ActionItem]) -> Counter[tuple[str, str]]:
    return Counter((_plain(item.owner), _plain(item.task)) for item in items)


def _plain(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


def _items(value: Any, place: str) -> list[ActionItem]:
    try:
        items = [ActionItem(each["owner"], each["task"], each.get("due")) for each in value]
        if all(isinstance(text, str) for item in items for text in (item.owner, item.task)):
            return items
    except (TypeError, KeyError, AttributeError):
        pass
    raise InputError(f"{place}: action_items must be a list of objects with owner and task")
