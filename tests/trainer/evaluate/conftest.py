"""A run that the tests of the eval runner share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_model as small
from saved_run import Run

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "validation.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "model", data)


@pytest.fixture
def run(tmp_path: Path, model: Path, make_config: MakeConfig) -> Run:
    return Run(tmp_path / "run", model, make_config, checkpoint__keep_last=3)
