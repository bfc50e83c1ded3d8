"""Tests that passed on another machine need not run again on this one.

`MOTLEY_NOTE_PASSED=FILE` adds the names of tests that pass to a file; `MOTLEY_PASSED=FILE` leaves
out the tests that such a file names. `.ci/run` takes both commands of the README to a bare host,
and runs here what that host had to skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

NOTE, LEAVE_OUT = "MOTLEY_NOTE_PASSED", "MOTLEY_PASSED"


class Notes:
    """Appends the name of each test that passes to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


class LeavesOut:
    """Deselects the tests that a file names."""

    def __init__(self, path: Path) -> None:
        self._names = frozenset(path.read_text(encoding="utf-8").splitlines())

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        passed = [item for item in items if item.nodeid in self._names]
        items[:] = [item for item in items if item.nodeid not in self._names]
        config.hook.pytest_deselected(items=passed)
