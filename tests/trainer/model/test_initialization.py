"""Initial weights: from the directory where it has them, else from frozen Philox streams."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trainer.model.initialization import WEIGHT_STD, draw_uniform, initial_weights
from trainer.model.layout import build_layout

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel


def test_streams_are_frozen() -> None:
    """Drift here would make old and new members of a run disagree.

    Made by `draw_uniform(7, "name", 4, 0.5).view(np.uint32)`.
    """
    frozen = [1047317688, 1047646212, 3200144440, 1048779204]
    assert draw_uniform(7, "name", 4, 0.5).view(np.uint32).tolist() == frozen


def test_uniform_fills_its_interval() -> None:
    draw = draw_uniform(0, "a", 100_000, 0.25)
    assert draw.dtype == np.float32
    assert -0.25 <= draw.min() < -0.249
    assert 0.249 < draw.max() <= 0.25
    assert abs(draw.mean()) < 0.002
    assert draw.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.01)
    assert not np.array_equal(draw, draw_uniform(1, "a", 100_000, 0.25))
    assert not np.array_equal(draw, draw_uniform(0, "b", 100_000, 0.25))
    assert np.array_equal(draw[:10], draw_uniform(0, "a", 10, 0.25))


def test_lora_starts_as_the_base_model(tiny_model: TinyModel, make_config: MakeConfig) -> None:
    folder = tiny_model()
    config = make_config(folder, training__seed=3)
    layout = build_layout(folder, config)
    flat = initial_weights(layout, folder, config)
    assert flat.shape == (layout.size,)
    assert flat.dtype == np.float32
    for slot in layout.iter_tensors():
        part = flat[slot.start : slot.stop]
        if "lora_A" in slot.name:
            assert 0.9 < np.abs(part).max() * math.sqrt(slot.shape[1]) <= 1
        elif "lora_B" in slot.name:
            assert not part.any()
        else:
            assert slot.name == "base_model.model.score.weight"
            assert part.std() == pytest.approx(WEIGHT_STD, rel=0.1)
    assert np.array_equal(flat, initial_weights(layout, folder, config))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("saved_as", ["causal-lm", "classify", "bare"])
def test_full_starts_from_the_stored_weights(
    tiny_model: TinyModel, make_config: MakeConfig, dtype: str, saved_as: str
) -> None:
    import safetensors.torch

    folder = tiny_model(saved_as=saved_as, dtype=dtype)
    config = make_config(folder, method="full")
    layout = build_layout(folder, config)
    flat = initial_weights(layout, folder, config)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    drawn: list[str] = []
    for slot in layout.iter_tensors():
        part = flat[slot.start : slot.stop].reshape(slot.shape)
        bare = slot.name.removeprefix("model.") if saved_as == "bare" else slot.name
        if bare in stored:
            assert np.array_equal(part, stored[bare].float().numpy()), slot.name
        else:
            drawn.append(slot.name)
            assert part.any()
    assert drawn == ([] if saved_as == "classify" else ["score.weight"])


def test_an_existing_head_is_kept_under_lora(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    import safetensors.torch

    folder = tiny_model(saved_as="classify")
    config = make_config(folder)
    layout = build_layout(folder, config)
    head = layout.blocks[-1]
    flat = initial_weights(layout, folder, config)
    stored = safetensors.torch.load_file(folder / "model.safetensors")["score.weight"]
    assert np.array_equal(flat[head.start :], stored.numpy().reshape(-1))
