"""The results of an experiment, with the source of each formula, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.system.commandline.table import Value, format_table

Row = dict[str, Value]


@dataclass(frozen=True)
class Formula:
    """A formula, and where it comes from."""

    text: str
    source: str


@dataclass(frozen=True)
class Experiment:
    """A table of computed or measured figures."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Value]]
    """All with the same keys, which are the columns' titles."""
    formulas: Sequence[Formula]
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the experiment as text for people."""
        yield self.title
        yield ""
        yield from format_table(self.rows)
        yield ""
        for formula in self.formulas:
            yield f"{formula.text}   [{formula.source}]"
        yield from self.notes

    def as_json(self) -> dict[str, Any]:
        """Return the experiment as `motley.lab/1`."""
        return {
            "schema": "motley.lab/1",
            "experiment": self.name,
            "rows": [dict(row) for row in self.rows],
            "formulas": [vars(formula) for formula in self.formulas],
            "notes": list(self.notes),
        }
