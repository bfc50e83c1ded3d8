"""Of a matrix of cases, those that `make test` runs: together they have each value or each pair."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

Case = tuple[Hashable, ...]


def covering(cases: Iterable[Case], together: int = 1) -> list[ParameterSet]:
    """Return all cases for `parametrize`; those that cover nothing more are `exhaustive`.

    Args:
        cases: tuples of values, one for each axis; one value a case may come without a tuple.
        together: how many values have to occur together: 1 for each value, 2 for each pair.
    """
    cells = [case if isinstance(case, tuple) else (case,) for case in cases]
    chosen = _chosen([_parts(cell, together) for cell in cells])
    return [
        pytest.param(*cell, marks=() if index in chosen else pytest.mark.exhaustive)
        for index, cell in enumerate(cells)
    ]


def _parts(cell: Case, together: int) -> set[Hashable]:
    return set(combinations(enumerate(cell), together))


def _chosen(cells: list[set[Hashable]]) -> set[int]:
    """Return the indexes of cells that together have all parts: the one with most is the next."""
    missing = set[Hashable]().union(*cells)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cells)), key=lambda index: len(cells[index] & missing))
        missing -= cells[best]
        chosen.add(best)
    return chosen
