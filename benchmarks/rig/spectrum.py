"""Made-up logits with the spectrum of a language model, and what a scheme keeps of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from trainer.distill.logits.description import (
    CorpusInfo,
    Description,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
    Values,
)
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.teacher.logits_compression import Scorer, draw_uniforms
from trainer.distill.teacher.rows import Rows

WINDOW = 256
"""Tokens of every window."""
_ROWS = 32


def logits(rows: int, vocab_size: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield logits of `rows` positions, up to 32 at a time, `[n, vocab_size]`.

    A Zipf law over ids, since a BPE's first tokens are its frequent ones, with noise of a strength
    that is drawn for each position: from positions where one token is nearly certain to open ones.
    The strengths are chosen so that 50 draws give about 12 different tokens, what arXiv:2503.16870
    reports of real teachers. Neighbouring positions are independent, as they are not in a text:
    what is stored of these compresses worse than what is stored of real ones.
    """
    draw = torch.Generator().manual_seed(seed)
    zipf = -0.6 * torch.log(torch.arange(vocab_size) + 3.0)
    for start in range(0, rows, _ROWS):
        count = min(_ROWS, rows - start)
        strength = 3.5 + 9.0 * torch.rand((count, 1), generator=draw)
        yield zipf + strength * torch.randn((count, vocab_size), generator=draw)


def describe(
    scheme: Scheme, tokens: int, size: int, *, shards: int = 1, values: Values = "float16"
) -> Description:
    """Return a folder of shards of `tokens` each: one document a window, all of 256 tokens."""
    windows = tokens // WINDOW
    return Description(
        teacher=TeacherInfo(
            name="random",
            digest="0" * 64,
            engine="torch",
            quantization="none",
            dtype="bfloat16",
            vocab_size=size,
            tokenizer_size=size,
        ),
        tokenizer=TokenizerInfo(digest="0" * 64, size=size),
        corpus=CorpusInfo(digest="0" * 64, documents=shards * windows),
        scheme=scheme,
        values=values,
        max_seq_len=WINDOW,
        seed=0,
        shards=tuple(
            ShardPlan(
                number=number,
                first_document=number * windows,
                stop_document=(number + 1) * windows,
                windows=windows,
                tokens=windows * WINDOW,
            )
            for number in range(shards)
        ),
    )


def synthetic(scheme: Scheme, tokens: int, size: int) -> list[Window]:
    """Return windows with what a scheme keeps of made-up logits."""
    scorer = Scorer(scheme, np.arange(size, dtype=np.int32), size)
    positions = tokens // WINDOW * (WINDOW - 1)
    points = draw_uniforms(0, 0, 0, positions, scorer.draws)
    parts: list[Rows] = []
    done = 0
    for part in logits(positions, size):
        parts.append(scorer.score_rows(part, points[done : done + len(part)]))
        done += len(part)
    rows = Rows.concatenate_rows(parts)
    draw = np.random.default_rng(1)
    return [
        Window(
            row,
            0,
            np.minimum(draw.zipf(1.2, WINDOW) - 1, size - 1).astype(np.int32),
            rows[row * (WINDOW - 1) : (row + 1) * (WINDOW - 1)].to_scores(
                with_logprobs=scheme.kind != "sampled"
            ),
        )
        for row in range(tokens // WINDOW)
    ]
