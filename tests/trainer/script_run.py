"""A small script of a user's, a run of it, and the loop that the user would have written."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config.run import SCRIPT, RunConfig, load_config
from trainer.config.script import read_script
from trainer.data.order import permute_epoch
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.run.composition import roles
from trainer.tracking.metrics import read_metrics

SAMPLES, BATCH = 48, 8
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

def model():
    frozen = nn.Linear(6, 8).requires_grad_(False)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def dataset(split):
    generator = torch.Generator().manual_seed(len(split))
    x = torch.randn(48 if split == "train" else 12, 6, generator=generator)
    return [(row, row.sin().sum()) for row in x]

def loss(model, samples):
    x, y = (torch.stack(part) for part in zip(*samples))
    return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(samples)

def metrics(model, samples):
    x, y = (torch.stack(part) for part in zip(*samples))
    return {"absolute": (model(x)[:, 0] - y).abs().sum()}
"""


def write_script(path: Path, *replacements: tuple[str, str]) -> Path:
    """Write the script with some of its text replaced."""
    text = SOURCE
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def script_config(output: Path, **settings: Any) -> RunConfig:
    """Return a run config of a script; dotted settings with `__` for the dot."""
    values: dict[str, Any] = {
        "task": SCRIPT,
        "output": str(output),
        "training.batch_size": BATCH,
        "training.epochs": 2,
        "training.micro_batch_size": 3,
        "optimizer.learning_rate": 1e-2,
        "optimizer.max_grad_norm": 1e9,
        "exchange.hash_every": 1,
    }
    return load_config(
        None, values | {key.replace("__", "."): value for key, value in settings.items()}
    )


def run_script(path: Path, config: RunConfig, run_id: str = "run") -> int:
    """Train in this process."""
    place = roles.Placement(
        gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None, script=read_script(path)
    )
    return roles.run_local(config, run_id, place)


def losses(output: Path) -> np.ndarray:
    """Return the loss of each step."""
    records = read_metrics(output / "metrics.jsonl")
    return np.array([record["loss"] for record in records if record["kind"] == "step"])


def plain_losses(path: Path, config: RunConfig) -> tuple[np.ndarray, torch.nn.Module]:
    """Return the losses of a plain loop with torch's AdamW on whole batches, and its model."""
    torch.manual_seed(config.training.seed)
    made = runpy.run_path(str(path))
    torch.manual_seed(config.training.seed)
    model, data = made["model"](), made["dataset"]("train")
    settings, trained = config.optimizer, [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon
    )
    epochs = config.training.epochs
    size = config.training.batch_size
    steps = epochs * len(data) // size
    found: list[float] = []
    for epoch in range(epochs):
        order = permute_epoch(config.training.seed, epoch, len(data))
        for start in range(0, len(data), size):
            samples = [data[int(index)] for index in order[start : start + size]]
            for group in optimizer.param_groups:
                group["lr"] = compute_learning_rate(len(found), steps, settings)
            optimizer.zero_grad()
            total, divisor = made["loss"](model, samples)
            (total / divisor).backward()
            optimizer.step()
            found.append(float(total.detach()) / divisor)
    return np.array(found), model
