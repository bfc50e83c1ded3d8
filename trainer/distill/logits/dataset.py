"""A folder of teacher logits, see `shard_folder`; a shard's file is logits.parquet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.distill.logits.description import Description, ShardPlan
from trainer.distill.logits.scores import Window
from trainer.distill.logits.shard_folder import DATASET, QUARANTINE, TEACHERS, ShardFolder

__all__ = ["DATASET", "QUARANTINE", "SHARD_FILE", "TEACHERS", "LogitsFolder", "find_window_faults"]

SHARD_FILE = "logits.parquet"


class LogitsFolder(ShardFolder[Description, Window]):
    """Reads and writes one folder of logits; any number of processes may do so at once."""

    file = SHARD_FILE

    def _parse_description(self, text: bytes) -> Description:
        return Description.from_json(text)

    def _encode_shard(self, plan: ShardPlan, items: Sequence[Window]) -> memoryview:
        from trainer.distill.logits.shard import encode_windows

        return encode_windows(self.description, plan, items)

    def _decode_shard(self, plan: ShardPlan, content: bytes) -> Sequence[Window]:
        from trainer.distill.logits.shard import decode_windows

        return decode_windows(self.description, plan, content)

    def _find_faults(self, plan: ShardPlan, items: Sequence[Window]) -> list[str]:
        return find_window_faults(plan, items)


def find_window_faults(plan: ShardPlan, windows: Iterable[Window]) -> list[str]:
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
            found.append(f"{name}: tokens {begin} to {min(expected, begin + length)} occur twice")
        document, stop = window.document, begin + length
        count, tokens = count + 1, tokens + length
    if (count, tokens) != (plan.windows, plan.tokens):
        found.append(
            f"{count} windows of {tokens} tokens, expected {plan.windows} of {plan.tokens}"
        )
    return found
