"""A teacher that is a table: what comes next depends on the last token alone. Learnt in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.trainer.tiny_logits import score
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import (
    CorpusInfo,
    Description,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
)
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.tokenizer.vocabulary import tokenizer_digest

LENGTHS = (5, 24)
TOP_K = Scheme(kind="topk", top_k=6, tail_samples=2)


class BigramTeacher:
    """Writes a folder of logits for the tokenizer of a model folder.

    Its documents are drawn from itself, so a student that learns has less loss.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        shards: int = 4,
        windows: int = 6,
        scheme: Scheme = TOP_K,
    ) -> None:
        size = load_tokenizer(model_dir).get_vocab_size()
        draw = np.random.default_rng(7)
        logits = draw.standard_normal((size, size)) + 9 * (draw.random((size, size)) < 4 / size)
        odds = np.exp(logits)
        self.table = odds / odds.sum(axis=1, keepdims=True)
        self.scheme = scheme
        self.written = [
            [self._window(draw, number * windows + row) for row in range(windows)]
            for number in range(shards)
        ]
        plans = tuple(
            ShardPlan(
                number=number,
                first_document=number * windows,
                stop_document=(number + 1) * windows,
                windows=windows,
                tokens=sum(len(window.tokens) for window in written),
            )
            for number, written in enumerate(self.written)
        )
        self.description = Description(
            teacher=TeacherInfo(
                name="table",
                digest="t" * 64,
                engine="torch",
                quantization="none",
                dtype="float32",
                vocab_size=size,
                tokenizer_size=size,
            ),
            tokenizer=TokenizerInfo(digest=tokenizer_digest(model_dir), size=size),
            corpus=CorpusInfo(digest="c" * 64, documents=shards * windows),
            scheme=scheme,
            values="float32",
            max_seq_len=LENGTHS[1],
            seed=0,
            shards=plans,
        )

    def write(self, path: Path, numbers: Iterable[int] | None = None) -> LogitsFolder:
        """Write some shards, or all of them."""
        folder = self.folder(path)
        for number in range(len(self.written)) if numbers is None else numbers:
            folder.write_shard(number, self.written[number])
        return folder

    def folder(self, path: Path) -> LogitsFolder:
        """Return a folder that is described, as a teacher does first."""
        folder = LogitsFolder(path)
        folder.write_description(self.description)
        return folder

    def _window(self, draw: np.random.Generator, document: int) -> Window:
        tokens = [int(draw.integers(len(self.table)))]
        for _ in range(int(draw.integers(*LENGTHS)) - 1):
            tokens.append(int(draw.choice(len(self.table), p=self.table[tokens[-1]])))
        scores = score(np.log(self.table[tokens[:-1]]), self.scheme, draw)
        return Window(document, 0, np.array(tokens, np.int32), scores)
