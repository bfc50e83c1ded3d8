"""Models of transformers' code go on from a prompt by the cache that their class keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trainer.replica.driving import drawn_weights
from tests.trainer.replica.test_families import pytestmark, theirs, write_trained
from tests.trainer.replica.test_unlisted_families import MERGED
from tests.trainer.replica.unlisted_models import write_tiny
from trainer.model.layout import build_layout
from trainer.replica.sampling import Sampling
from trainer.replica.torch.generator import load_generator

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

__all__ = ["pytestmark"]


@pytest.mark.long
@pytest.mark.parametrize(
    "model_type", ["cohere_compass_text", "falcon_mamba", "mamba", "mamba2", "minimax", "zamba2"]
)
def test_caches_of_all_kinds_go_on_from_a_prompt(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    """Keys that the backbone leaves to the model around it, states alone, both, one of its own."""
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm", lora__lora_rank=2)
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    model: Any = theirs(adapter, folder, config)
    model = model.eval().merge_and_unload() if model_type in MERGED else model.eval()
    prompts = [[7, 8, 9, 10, 11, 12], [75], [110, 120, 130]]
    wanted: list[list[int]] = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(5):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    generator = load_generator(folder, config, layout, weights)
    assert generator.generate(prompts, max_new_tokens=5, sampling=Sampling()) == wanted
