"""Proof that a shard holds every token of its documents exactly once, and in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer.distill.logits.scores import Window

if TYPE_CHECKING:
    from trainer.distill.logits.description import ShardPlan


def faults(plan: ShardPlan, windows: Iterable[Window]) -> list[str]:
    """Return descriptions of what is missing, doubled or out of order in a shard.

    Windows of a document follow each other without a gap. A plan does not contain the documents'
    lengths: tokens missing at a document's end show in the shard's totals.
    """
    found: list[str] = []
    document, stop, count, tokens = plan.first_document, 0, 0, 0
    for window in windows:
        begin, length = window.start, len(window.tokens)
        expected = stop if window.document == document else 0
        name = f"document {window.document}"
        if not plan.first_document <= window.document < plan.stop_document:
            found.append(f"{name} is not of this shard")
        elif window.document < document:
            found.append(f"{name} comes after document {document}")
        elif begin > expected:
            found.append(f"{name}: tokens {expected} to {begin} are missing")
        elif begin < expected:
            found.append(f"{name}: tokens {begin} to {min(expected, begin + length)} come twice")
        document, stop = window.document, begin + length
        count, tokens = count + 1, tokens + length
    if (count, tokens) != (plan.windows, plan.tokens):
        found.append(
            f"{count} windows of {tokens} tokens, expected {plan.windows} of {plan.tokens}"
        )
    return found
