"""Models for ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.replica.torch.parallel.models import write_drawn_model

DrawnModel = Callable[..., str]


@pytest.fixture(scope="session")
def drawn_model(tmp_path_factory: pytest.TempPathFactory) -> DrawnModel:
    """Return a maker of model folders; the same arguments give the same one."""
    made: dict[str, str] = {}

    def make(model_type: str = "qwen3", **settings: Any) -> str:
        key = repr((model_type, sorted(settings.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("drawn") / "model"
            made[key] = str(write_drawn_model(folder, model_type, **settings))
        return made[key]

    return make
