"""Tables of the keys of files that a person brings: used, harmless, refused (F-IN-001).

A reader has one table. A key is used, or harmless, or refused by its name with what to do. A key
that is in none of them is counted and reported once, when the file has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

REPORTED_KEYS = 8
"""Unknown keys that a report names; the others are counted."""
SHOWN_CHARACTERS = 60
_COUNTED = 1000
"""Unknown keys that are counted each by its name; a file may have another one in each line."""


@dataclass(frozen=True)
class KeyTable:
    """The keys that one reader knows."""

    what: str
    """Owner of the keys, as messages call it: `a data line`, `config.json`."""
    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    """Change nothing that is learned, computed or reached."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Would change it and is not supported: the reason and what to do, for an error line."""
    fate: str = "that are not used"
    """The fate of the keys that are in no part, for their report."""

    def __post_init__(self) -> None:
        twice = self.used & self.harmless | (self.used | self.harmless) & self.refused.keys()
        assert not twice, f"{self.what}: {sorted(twice)} occur twice"

    def explain_refusal(self, keys: Iterable[str]) -> str | None:
        """Return what is wrong with the first refused key; None if none is refused."""
        return next((f"'{key}' {self.refused[key]}" for key in keys if key in self.refused), None)

    def find_unknown(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are in no part of the table, in their order."""
        return [
            key
            for key in keys
            if key not in self.used and key not in self.harmless and key not in self.refused
        ]


class UnknownKeys:
    """Counts the unknown keys of one file, for one line at the start."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self.counts: Counter[str] = Counter()
        """By key."""
        self.others = 0
        """Count of keys beyond those that are counted apart."""

    def add(self, keys: Iterable[str]) -> None:
        """Count the unknown ones among the keys of one object."""
        if unknown := self._table.find_unknown(keys):
            self.merge(Counter(key[:SHOWN_CHARACTERS] for key in unknown), 0)

    def merge(self, counts: Mapping[str, int], others: int) -> None:
        """Add counts of later objects."""
        self.others += others
        for name, count in counts.items():
            if name in self.counts or len(self.counts) < _COUNTED:
                self.counts[name] += count
            else:
                self.others += count

    def report(self) -> str | None:
        """Return `keys of ... that are not used: 'lable' (240 times), ...`, or None."""
        if not self.counts:
            return None
        found = self.counts.most_common()
        named = [
            f"{key!r} ({count:,} {'time' if count == 1 else 'times'})"
            for key, count in found[:REPORTED_KEYS]
        ]
        rest = len(found) - len(named)
        more = f" and {rest} more" if rest else ""
        more += f", and other keys {self.others:,} times" if self.others else ""
        return f"keys of {self._table.what} {self._table.fate}: {', '.join(named)}{more}"
