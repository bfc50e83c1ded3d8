"""Score a model's minutes against reference minutes: ROUGE-L and action items.

    trainer generate RUN --data data/validation.jsonl --max-new-tokens 512 --json >answers.jsonl
    python examples/meetings/score.py data/validation.jsonl answers.jsonl

ROUGE-L (Lin 2004) is the F-measure of the longest common subsequence of words, here lower-case and
without punctuation, not stemmed. An action item is found if owner and task are the reference's,
letter case and punctuation aside; the reference's are those of the key `action_items`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from meetings.minutes import find_action_items

RESAMPLES = 1000
_WORD = re.compile(r"[^\W_]+")


def main() -> None:
    """Print each figure with its 95 % interval."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("references", type=Path)
    parser.add_argument("answers", type=Path)
    options = parser.parse_args()
    references, answers = map(_lines, (options.references, options.answers))
    if not references or len(references) != len(answers):
        sys.exit(f"score: {len(references)} references and {len(answers)} answers")
    pairs = zip(references, answers, strict=True)
    for name, (value, low, high) in figures([compare(*pair) for pair in pairs]).items():
        print(f"{name:<20} {value:.3f}  ({low:.3f} to {high:.3f})")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare(reference: dict[str, Any], answer: dict[str, Any]) -> tuple[float, int, int, int, int]:
    """Return ROUGE-L and 1, and how many action items both have, the reference and the answer."""
    items = reference["action_items"]
    wanted = _counted((item["owner"], item["task"]) for item in items)
    written = _counted((item.owner, item.task) for item in find_action_items(answer["text"]))
    likeness = rouge_l(answer["text"], reference["messages"][-1]["content"])
    return likeness, 1, (wanted & written).total(), wanted.total(), written.total()


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L, in [0, 1]."""
    one, other = (_WORD.findall(text.casefold()) for text in (answer, reference))
    row = [0] * (len(other) + 1)
    for word in one:
        before, row = row, [0]
        for place, their in enumerate(other):
            row.append(before[place] + 1 if word == their else max(before[place + 1], row[-1]))
    return 2 * row[-1] / (len(one) + len(other)) if row[-1] else 0.0


def figures(
    scores: Sequence[tuple[float, int, int, int, int]],
) -> dict[str, tuple[float, float, float]]:
    """Return means with both ends of their 95 % intervals.

    `action_items_found` is the share of the references' action items, `action_items_right` that of
    the written ones; a figure about no item at all is left out. The intervals are percentiles of
    1,000 bootstrap resamples of the conversations, drawn from a fixed seed.
    """
    parts = np.array(scores, np.float64)
    draws = np.random.default_rng(0).integers(len(parts), size=(RESAMPLES, len(parts)))
    sums = np.vstack([parts.sum(axis=0), *(parts[draw].sum(axis=0) for draw in draws)])
    found: dict[str, tuple[float, float, float]] = {}
    for name, above, below in (
        ("rouge_l", 0, 1),
        ("action_items_found", 2, 3),
        ("action_items_right", 2, 4),
    ):
        defined = sums[sums[:, below] > 0]
        if sums[0, below]:
            values = defined[:, above] / defined[:, below]
            low, high = np.percentile(values, (2.5, 97.5))
            found[name] = float(values[0]), float(low), float(high)
    return found


def _counted(items: Iterable[tuple[str, str]]) -> Counter[tuple[str, str]]:
    return Counter((_plain(owner), _plain(task)) for owner, task in items)


def _plain(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


if __name__ == "__main__":
    main()
