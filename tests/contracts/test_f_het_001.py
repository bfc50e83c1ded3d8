"""F-HET-001: every backend produces the same gradient layout, whichever way the base is stored.

A backend that trains adds itself to `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainer.config.run import RunConfig
from trainer.model.layout import GradientLayout, build_layout

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel


def from_headers(folder: Path, config: RunConfig) -> GradientLayout:
    """What the coordinator and the wgpu backend see."""
    return build_layout(folder, config)


def from_torch(folder: Path, config: RunConfig) -> GradientLayout:
    """What the loaded model really trains, laid out as the headers say."""
    import torch

    from trainer.model.layout import Block, TensorSlot
    from trainer.replica.torch.loader import load_model
    from trainer.replica.torch.model import trainable_parameters

    expected = build_layout(folder, config)
    parameters = dict(trainable_parameters(load_model(folder, config, torch.device("cpu"))))
    blocks = tuple(
        Block(
            block.index,
            block.name,
            block.start,
            block.stop,
            tuple(
                TensorSlot(slot.name, tuple(parameters.pop(slot.name).shape), slot.start)
                for slot in block.tensors
            ),
        )
        for block in expected.blocks
    )
    assert not parameters, f"trained but not laid out: {sorted(parameters)}"
    return GradientLayout(blocks, expected.num_layers)


BACKENDS: dict[str, Callable[[Path, RunConfig], GradientLayout]] = {
    "headers": from_headers,
    "torch": from_torch,
}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_every_backend_has_the_same_layout(
    tiny_model: TinyModel, make_config: MakeConfig, model_type: str, method: str, task: str
) -> None:
    digests: dict[str, str] = {}
    for saved_as in ("causal-lm", "bare"):
        folder = tiny_model(model_type, saved_as)
        config = make_config(folder, method=method, task=task)
        for name, backend in BACKENDS.items():
            digests[f"{name} {saved_as}"] = backend(folder, config).digest
    assert len(set(digests.values())) == 1, digests
