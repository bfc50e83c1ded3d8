"""The merges of a byte-pair encoding that a corpus applies, and the choice of those to keep.

Byte-pair encoding (Sennrich et al., arXiv:1508.07909) builds a token by a tree of merges, which
does not depend on the token's context: had a merge across its bounds come first, it would not be
that token. So the counts of a corpus's tokens give the counts of its merges, and removing a merge
costs one token each time. A part is made at least as often as the whole, so the tokens that are
made most come with all of their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from trainer.system.errors import InputError

Merge = tuple[str, str]


class Bpe:
    """A byte-level BPE, as its parsed tokenizer.json describes it.

    Args:
        tree: the parsed file, accepted by the tokenizers library.
        where: names the file in errors.

    Raises:
        InputError: it is not a byte-level BPE.
    """

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        model = tree["model"]
        kind = model.get("type", "BPE")  # older files lack it
        if kind != "BPE":
            raise InputError(f"{where}: is a {kind} tokenizer, only byte-level BPE can be trimmed")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise InputError(f"{where}: has {key} {model[key]!r}, which cannot be trimmed")
        if not _is_byte_level(tree):
            raise InputError(f"{where}: is a BPE of characters, only byte-level BPE can be trimmed")
        added = {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
        self.ids: dict[str, int] = {**model["vocab"], **added}
        """Every token and its id, added ones included."""
        letters = frozenset((*pre_tokenizers.ByteLevel.alphabet(), model.get("unk_token")))
        self.fixed = letters & model["vocab"].keys() | added.keys()
        """Tokens that are always kept: the bytes, of which a vocabulary may lack some, what stands
        for those, and the added tokens."""
        self.merges = [_parse_merge(merge) for merge in model["merges"]]
        """In the order of application."""
        self.completions = _index_merges(self.merges)
        """The merge that completes each token in any text."""

    def count_made_tokens(self, counts: NDArray[np.int64]) -> dict[str, int]:
        """Return how often each token is made, by itself or as a part of another.

        Args:
            counts: `[largest id + 1]` how often a corpus uses each token.
        """
        made = {token: int(counts[id]) for token, id in self.ids.items()}
        for token in sorted(self.completions, key=len, reverse=True):
            for part in self.completions[token]:
                made[part] += made[token]
        return made

    def select_tokens(self, counts: NDArray[np.int64], size: int) -> set[str]:
        """Return the `size` tokens that a corpus uses most, each with all of its parts.

        Ties are in the order of their merges: tokens that the corpus does not use are ranked by the
        tokenizer's own training.
        """
        made = self.count_made_tokens(counts)
        ranks = {merge: rank for rank, merge in enumerate(self.merges)}

        def rank_token(token: str) -> tuple[int, int]:
            # A token without a merge is found as a whole word (`ignore_merges`), or never.
            merge = self.completions.get(token)
            return -made[token], len(ranks) + self.ids[token] if merge is None else ranks[merge]

        kept = set(self.fixed)
        for token in sorted(self.ids.keys() - kept, key=rank_token):
            missing = self._merge_tree(token) - kept
            if len(kept) + len(missing) <= size:
                kept |= missing
        return kept

    def select_merges(self, kept: set[str]) -> list[Merge]:
        """Return the merges of kept tokens into kept tokens, in their order."""
        return [merge for merge in self.merges if kept.issuperset((*merge, "".join(merge)))]

    def _merge_tree(self, token: str) -> set[str]:
        tree: set[str] = set()
        parts = [token]
        while parts:
            part = parts.pop()
            tree.add(part)
            parts.extend(self.completions.get(part, ()))
        return tree


def _is_byte_level(tree: Any) -> bool:
    """Search a tokenizer's normalizer and pre-tokenizer, which may be sequences of others."""
    if isinstance(tree, list):
        return any(map(_is_byte_level, tree))
    if not isinstance(tree, dict):
        return False
    if tree.get("type") == "ByteLevel":
        return True
    inner = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    return any(_is_byte_level(tree.get(key)) for key in inner)


def _parse_merge(merge: Any) -> Merge:
    """Read a merge; older files have it as one string, with tokens that contain no space."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _index_merges(merges: list[Merge]) -> dict[str, Merge]:
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    ways: dict[str, list[Merge]] = {}
    for merge in merges:
        ways.setdefault("".join(merge), []).append(merge)
    completions: dict[str, Merge] = {}
    for token, last in ways.items():
        merge = last[0] if len(last) == 1 else _last_merge(token, ranks)
        if merge is not None:
            completions[token] = merge
    return completions


def _last_merge(token: str, ranks: dict[Merge, int]) -> Merge | None:
    """Encode a token by itself; return the merge that completes it, None if none does."""
    parts, last = list(token), None
    while len(parts) > 1:
        known = [
            (ranks[pair], start) for start, pair in enumerate(pairwise(parts)) if pair in ranks
        ]
        if not known:
            return None
        _, start = min(known)
        last = (parts[start], parts[start + 1])
        parts[start : start + 2] = ["".join(last)]
    return last
