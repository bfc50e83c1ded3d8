"""A full model is in memory once, in the fp32 that it is computed in, however it is used."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer import small_model as small
from trainer.checkpoint.trained_model import load_trained
from trainer.data.shapes import Sample
from trainer.evaluate.generation import complete_samples
from trainer.evaluate.scoring import score_file
from trainer.init_model import init_model
from trainer.lab.training import PeakMemory
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling

pytestmark = pytest.mark.long

SIZES = replace(small.SIZES, hidden_size=256, intermediate_size=8192, num_layers=4)


def generate(model: Path, _data: Path) -> None:
    complete_samples(
        load_trained(model), [Sample("echo")], 2, Sampling(), Compute("cpu", threads=1)
    )


def evaluate(model: Path, data: Path) -> None:
    score_file(load_trained(model), data, Compute("cpu", threads=1))


def peak(use: Callable[[Path, Path], None], small_one: Path, model: Path, data: Path) -> int:
    use(small_one, data)  # what it imports
    with PeakMemory(torch.device("cpu")) as found:
        use(model, data)
    assert found.bytes is not None
    return found.bytes


@pytest.mark.parametrize("use", [generate, evaluate])
def test_a_full_model_is_held_once(
    use: Callable[[Path, Path], None], tmp_path: Path, model: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "mkdir -p build"}\n')
    large = init_model(small.write_data(tmp_path / "words.jsonl"), tmp_path / "large", SIZES)
    stored = load_file(large / "model.safetensors")
    weights = {name: tensor.bfloat16() for name, tensor in stored.items()}
    save_file(weights, large / "model.safetensors", metadata={"format": "pt"})
    # Alone: the peak counts what threads of earlier tests still take.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        found = executor.submit(peak, use, model, large, data).result()
    once = 4 * sum(tensor.numel() for tensor in weights.values())
    assert found < 1.6 * once, f"{found / once:.2f} times"
