"""A run that the tests of the eval runner share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.saved_run import Run

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


@pytest.fixture
def run(tmp_path: Path, model: Path, make_config: MakeConfig) -> Run:
    return Run(tmp_path / "run", model, make_config, checkpoint__keep_last=3)
