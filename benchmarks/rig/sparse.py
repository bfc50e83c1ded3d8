"""Logits that keep a teacher's scores at some positions; the others learn their text's token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.scores import Scores, Window


def thinned(logits: LogitsFolder, student: LogitsFolder, share: float, path: Path) -> LogitsFolder:
    """Write a copy that is scored where the student is least certain (SE-KD, arXiv 2602.01395).

    Args:
        student: scores of the same windows by the student at its start, for their entropy.
        share: of a window's positions that stay scored.
    """
    kept = LogitsFolder(path)
    kept.describe(logits.description)
    for number in kept.missing():
        pairs = zip(logits.read(number), student.read(number), strict=True)
        kept.write(number, [_thin(ours, other.scores.entropy, share) for ours, other in pairs])
    return kept


def _thin(window: Window, entropy: NDArray[np.float32], share: float) -> Window:
    old = window.scores
    assert old.logprobs is not None, "of topk"
    positions = 1 + np.argsort(-entropy[1:], kind="stable")
    stays = np.zeros(len(entropy), bool)
    stays[positions[: round(share * len(positions))]] = True
    counts = np.where(stays, np.diff(old.offsets), 1)
    counts[0] = 0  # the first token is nobody's prediction
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # A text's token is one that is kept, of probability 1.
    ids = np.repeat(window.tokens, counts)
    logprobs, draws = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    here = np.repeat(stays, counts)
    there = np.repeat(stays, np.diff(old.offsets))
    ids[here], logprobs[here], draws[here] = (
        each[there] for each in (old.ids, old.logprobs, old.counts)
    )
    tail, dropped, left = (
        np.where(stays, each, 0).astype(np.float32) for each in (old.tail, old.dropped, old.entropy)
    )
    scores = Scores(offsets, ids.astype(np.int32), logprobs, draws, tail, dropped, left)
    return replace(window, scores=scores)
