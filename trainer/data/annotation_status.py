"""The status that annotation tools give a line: one that was rejected is refused, never learned.

Prodigy's `answer`, the `status` of Argilla, distilabel and Mechanical Turk, and flags such as Label
Studio's `was_cancelled`. Another value of such a key says nothing, and the key is any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trainer.data.values import BadLineError, format_value

_OF_PRODIGY = frozenset(("reject", "ignore"))
_REJECTED = frozenset(
    (
        *(*_OF_PRODIGY, "rejected", "ignored", "skipped", "discarded", "cancelled", "canceled"),
        *("deleted", "invalid", "draft", "tie"),
    )
)
"""Statuses of lines that annotators did not accept, or of answers of equal rank."""
_YES, _NO = frozenset(("true", "1", "yes")), frozenset(("false", "0", "no"))
_FLAGS = frozenset(
    ("was_cancelled", "cancelled", "is_rejected", "discarded", "skipped", "ignored", "deleted")
)
_APPROVALS = frozenset(("accepted", "approved", "is_accepted", "is_approved", "is_valid"))


def is_status(key: str) -> bool:
    """Return whether a key may hold a status."""
    return bool(_rejecting_values(key))


def find_rejections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of an object that say that it was rejected."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if words := _rejecting_values(key):
            values = value if isinstance(value, list) else [value]
            if any(str(each).strip().lower() in words for each in values):
                found[key] = value
    return found


def check_accepted(tree: Mapping[str, Any]) -> None:
    """Check that no annotator rejected a line.

    Raises:
        BadLineError: one did.
    """
    for key, value in find_rejections(tree).items():
        raise BadLineError(
            f"'{key[:40]}' is {format_value(value)}: the line was not accepted, so it is not"
            " learned; remove such lines, or the key if it means something else"
        )


@lru_cache(maxsize=1024)
def _rejecting_values(key: str) -> frozenset[str]:
    """Return the values of a key that reject a line, in lower case."""
    name = key.lower()
    if name == "answer":
        return _OF_PRODIGY
    if name.endswith("status"):
        return _REJECTED
    return _YES if name in _FLAGS else _NO if name in _APPROVALS else frozenset()
