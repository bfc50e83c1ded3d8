"""What is marked `exhaustive` is a further cell of a matrix that `make test` covers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from tests import ROOT
from tests.covering import covering


def test_nothing_is_marked_by_hand() -> None:
    """A distinct fault, message or behaviour is part of `make test`."""
    here = {Path(__file__), ROOT / "tests" / "covering.py"}
    files = set((ROOT / "tests").rglob("*.py")) - here
    assert [file for file in files if "mark.exhaustive" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("together", [1, 2, 3])
def test_all_cells_remain_and_every_combination_is_in_one_that_is_not_marked(together: int) -> None:
    cases = list(product("abc", "def", "ghij"))
    found = covering(cases, together)
    assert [cell.values for cell in found] == cases
    unmarked = [tuple(cell.values) for cell in found if not cell.marks]
    assert len(unmarked) <= {1: 4, 2: 14, 3: 36}[together]

    def combined(cells: Sequence[tuple[object, ...]]) -> set[object]:
        return {part for cell in cells for part in combinations(enumerate(cell), together)}

    assert combined(unmarked) == combined(cases)
