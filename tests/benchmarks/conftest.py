"""What is measured is imported as the scripts of `benchmarks/` import it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests import ROOT


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module `benchmarks/one_card.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("one_card")
