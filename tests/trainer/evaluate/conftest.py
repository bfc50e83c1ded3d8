"""A run and a model that the tests of evaluations share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer import small_model as small
from tests.trainer.saved_run import Run

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


@pytest.fixture
def run(tmp_path: Path, model: Path, make_config: MakeConfig) -> Run:
    return Run(tmp_path / "run", model, make_config, checkpoint__keep_last=3)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    data = small.write_data(folder / "data.jsonl")
    return small.write_model(folder / "model", data, sizes=small.DEEP_SIZES)
