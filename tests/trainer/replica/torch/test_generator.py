"""Tokens are those of transformers' own `generate`, which continues each prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.replica.driving import drawn_weights, gradient, start
from tests.trainer.replica.torch.parallel.models import write_drawn_model
from tests.trainer.replica.torch.parallel.one_process import run_config
from trainer.data.tokens import Encoded
from trainer.model.layout import build_layout
from trainer.replica.sampling import Sampling
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.generator import TorchGenerator, load_generator

PROMPTS = [[7, 8, 9, 10, 11, 12], [75], [110, 120, 130], [200, 3]]
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.mark.parametrize(
    ("family", "model", "settings"),
    [
        ("qwen3", {}, {"lora.lora_rank": 4}),
        ("qwen2", {}, {"method": "full", "model.dtype": "bfloat16"}),
        ("smollm3", {"no_rope_layers": [1, 0], "pad_token_id": 0}, {"lora.lora_rank": 4}),
        ("qwen3", {"hidden_act": "gelu"}, {"lora.lora_rank": 4}),
    ],
    ids=["qwen3-lora", "qwen2-full-bf16", "smollm3-lora", "not-our-decoder"],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    import torch
    import transformers

    from trainer.replica.torch.model import flatten_parameters
    from trainer.replica.torch.published_model import load_published

    folder = write_drawn_model(tmp_path / "model", family, **model)
    config = run_config(str(folder), settings)
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    cpu = torch.device("cpu")
    judge: Any = load_published(folder, config, cpu)
    flatten_parameters(judge, layout, cpu).copy_(torch.from_numpy(weights))
    judge.generation_config = transformers.GenerationConfig()
    wanted: list[list[int]] = []
    bf16 = config.model.dtype == "bfloat16"
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            made = judge.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, pad_token_id=0
            )
        wanted.append(made[0, len(prompt) :].tolist())
    ours = load_generator(folder, config, layout, weights, batch=3)
    assert isinstance(ours._model, Decoder) == ("hidden_act" not in model)
    for generator in (ours, TorchGenerator(judge, config, cpu, batch=3)):
        found = generator.generate(PROMPTS, max_new_tokens=7, sampling=Sampling())
        assert found == wanted


@pytest.mark.parametrize("model", [{}, {"hidden_act": "gelu"}], ids=["ours", "transformers"])
def test_a_replica_answers_between_steps_without_a_trace(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    """As `trainer generate` with the same weights, also where layers are computed twice."""
    folder = write_drawn_model(tmp_path / "model", "qwen3", **model)
    settings = {"lora.lora_rank": 4, "training.gradient_checkpointing": "on"}
    config = run_config(str(folder), settings)
    replica, weights = start(folder, config)
    batch = [Encoded(np.array(prompt, np.int32), np.array(prompt)) for prompt in PROMPTS[:1]]
    before, _, _ = gradient(replica, batch)
    stop = frozenset((250,))
    found = replica.answer(PROMPTS, 5, stop)
    generator = load_generator(folder, config, replica.layout, weights)
    options: dict[str, Any] = {"max_new_tokens": 5, "sampling": Sampling(), "stop": stop}
    assert found == generator.generate(PROMPTS, **options)
    assert np.array_equal(gradient(replica, batch)[0], before)
