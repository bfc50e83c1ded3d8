"""The model of `trainer distill generate`: a teacher of torch that continues prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config.run import load
from trainer.distill.answers.author import Generate
from trainer.distill.teacher.torch_engine import open_torch
from trainer.model.families import family_of
from trainer.model.safetensors_headers import read_config
from trainer.replica.backend import Compute
from trainer.replica.torch.generator import generator_of


def open_generate(model_dir: Path, dtype: str, compute: Compute, batch: int) -> Generate:
    """Load a model on CUDA if that works, else on the CPU, and return what continues prompts.

    Args:
        batch: the most answers that are written together.

    Raises:
        InputError: the model cannot be loaded, or is of an architecture that Motley does not know.
    """
    if compute.threads is not None:
        torch.set_num_threads(compute.threads)
    family_of(read_config(model_dir), str(model_dir))
    engine = open_torch(model_dir, dtype, compute)
    settings = {
        "task": "causal-lm",
        "method": "full",
        "model.path": str(model_dir),
        "data.train": "none",
        "training.precision": "fp32",  # products take the weights' own dtype
    }
    config = load(None, settings)
    return generator_of(engine.model, model_dir, config, engine.device, batch=batch).generate
