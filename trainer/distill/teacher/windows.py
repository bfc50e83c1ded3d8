"""A corpus in windows of tokens, and its split into shards, before anything is scored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.document_tokens import DocumentTokens, Range, group_documents
from trainer.distill.logits.description import ShardPlan
from trainer.model.safetensors_headers import read_config, read_position_count
from trainer.planning.teachers import WINDOW
from trainer.system.errors import InputError

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 19
"""Text of a shard, which a killed teacher loses. At 300 tokens a second it takes ten minutes."""


@dataclass(frozen=True, slots=True, eq=False)
class UnscoredWindow:
    """Consecutive tokens of one document, not yet scored; see `distill.logits.scores.Window`."""

    document: int
    start: int
    tokens: NDArray[np.int32]
    """`[T]` student token ids."""
    learned: NDArray[np.bool_] | None = None
    """`[T]`: the tokens whose predictions are kept, of which a window's first has none; None: all.
    What else there is, such as a prompt, is context."""

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """The positions whose predictions are kept, `[T]`."""
        wanted = np.ones(len(self.tokens), bool) if self.learned is None else self.learned.copy()
        wanted[0] = False
        return wanted


class WindowCutter:
    """Cuts documents into windows of at most `max_seq_len` tokens.

    A text ends with the tokenizer's end-of-text token if it has one. A longer document is cut
    into consecutive windows; each is scored separately, so its first token has no scores. Of a
    conversation, or a prompt with its completion, what training learns is scored.
    """

    def __init__(self, documents: DocumentTokens, max_seq_len: int) -> None:
        self._documents, self._max_seq_len = documents, max_seq_len

    def split_documents(self, shard_bytes: int) -> list[Range]:
        """Return ranges of documents with at least `shard_bytes` of text each, except the last.

        Shards depend on the text alone, so that every tokenizer gives the same.
        """
        return list(group_documents(self._documents.iter_sizes(), shard_bytes))

    def plan_shards(self, ranges: Sequence[Range]) -> tuple[ShardPlan, ...]:
        """Return how many windows and tokens each shard has; tokenises the whole corpus.

        Raises:
            InputError: a document has no token.
        """
        plans: list[ShardPlan] = []
        for number, (first, stop) in enumerate(ranges):
            lengths = [len(ids) for _, ids, _ in self._documents.iter_tokens(first, stop)]
            plans.append(
                ShardPlan(
                    number=number,
                    first_document=first,
                    stop_document=stop,
                    windows=sum(-(-length // self._max_seq_len) for length in lengths),
                    tokens=sum(lengths),
                )
            )
        return tuple(plans)

    def cut_shard(self, shard: ShardPlan) -> list[UnscoredWindow]:
        """Return the windows of a shard in their order.

        Raises:
            InputError: a document has changed since it was hashed.
        """
        windows: list[UnscoredWindow] = []
        found = self._documents.iter_tokens(shard.first_document, shard.stop_document)
        for document, ids, learns in found:
            for start in range(0, len(ids), self._max_seq_len):
                part = slice(start, start + self._max_seq_len)
                learned = None if learns is None else np.array(learns[part])
                tokens = np.array(ids[part], np.int32)
                windows.append(UnscoredWindow(document, start, tokens, learned))
        return windows


def window_length(model_dir: Path, wanted: int | None) -> int:
    """Return the tokens of a window: the requested number, else the teacher's maximum."""
    positions = read_position_count(read_config(model_dir))
    if positions is None or (wanted or WINDOW) <= positions:
        return wanted or WINDOW
    if wanted is not None:
        raise InputError(
            f"--max-seq-len {wanted}: the teacher has {positions} positions; give at most that"
        )
    log.info("windows of %d tokens, not %d: the teacher has no more positions", positions, WINDOW)
    return positions
