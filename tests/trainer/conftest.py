"""What most tests of the trainer start from: a data file, and a small model made from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.tiny import Tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of labelled lines; tests must not write to it."""
    from tests.trainer.small_model import write_data

    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model; tests must not write into it."""
    from tests.trainer.small_model import write_model

    return write_model(tmp_path_factory.mktemp("small") / "model", data)


@pytest.fixture(scope="session")
def tiny(tiny_model: TinyModel, make_config: MakeConfig) -> Tiny:
    """Return makers of tiny models and of what is made of them."""
    from tests.trainer.tiny import Tiny

    return Tiny(tiny_model, make_config)
