"""What is marked `exhaustive` is a further cell of a matrix that `make test` covers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from tests import ROOT
from tests.covering import covering

# Prints, for each matrix that has a marked cell: for each axis its values, those of unmarked cells.
COLLECT = """
import collections, json, sys, pytest

class Matrices:
    def pytest_collection_finish(self, session):
        cells = collections.defaultdict(list)
        for item in session.items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            is_marked = item.get_closest_marker("exhaustive") is not None
            cells[item.nodeid.partition("[")[0]].append((params, is_marked))
        found = {}
        for test, its in cells.items():
            if any(marked for _, marked in its):
                axes = collections.defaultdict(lambda: [set(), set()])
                for params, marked in its:
                    for name, value in params.items():
                        axes[name][0].add(repr(value))
                        if not marked:
                            axes[name][1].add(repr(value))
                found[test] = {name: list(map(sorted, sets)) for name, sets in axes.items()}
        print("\\nmatrices", json.dumps(found))

sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[Matrices()]))
"""


def not_covered(files: Sequence[Path], folder: Path) -> dict[str, list[str]]:
    """Return what of each test is in marked cells alone: values by axis, or the test as a whole."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, "-p", "no:cacheprovider", *map(str, files)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("matrices ")]
    found: dict[str, dict[str, tuple[list[str], list[str]]]] = json.loads(line.split(" ", 1)[1])
    assert found
    missing = {
        test: [f"{axis}={v}" for axis, (all_, run) in axes.items() for v in all_ if v not in run]
        if axes
        else ["all of it"]
        for test, axes in found.items()
    }
    return {test: values for test, values in missing.items() if values}


def test_each_value_of_every_matrix_is_in_make_test() -> None:
    files = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.exhaustive" in (text := file.read_text(encoding="utf-8")) or "covering(" in text
    ]
    assert len(files) > 2
    assert not_covered([file for file in files if file != Path(__file__)], ROOT) == {}


def test_a_value_or_a_test_that_make_test_leaves_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive: as in pyproject.toml\n")
    file = tmp_path / "test_sample.py"
    file.write_text(
        "import pytest\n"
        "further = pytest.mark.exhaustive\n"
        "@further\n"
        "def test_whole(): pass\n"
        "@pytest.mark.parametrize('a, b', [(1, 1), pytest.param(1, 2, marks=further)])\n"
        "def test_value(a, b): pass\n"
        "@pytest.mark.parametrize('a, b', [(1, 1), (2, 2), pytest.param(1, 2, marks=further)])\n"
        "def test_covered(a, b): pass\n"
    )
    assert not_covered([file], tmp_path) == {
        "test_sample.py::test_whole": ["all of it"],
        "test_sample.py::test_value": ["b=2"],
    }


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
