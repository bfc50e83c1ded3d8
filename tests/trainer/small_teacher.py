"""A corpus, a model that was made from it, and a pass of that teacher over it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from tests.trainer import small_model
from trainer.data.documents import Documents
from trainer.distill.logits.scores import Scheme
from trainer.distill.teacher.assignment import Assignment, ScoringRequest, assign_request
from trainer.distill.tokenizer.trim import trim_to_size
from trainer.init_model import ModelSizes, init_model

if TYPE_CHECKING:
    from trainer.distill.teacher.scoring import Teacher

SIZES = replace(small_model.SIZES, vocab_size=400)
WIDE_SIZES = replace(small_model.DEEP_SIZES, num_layers=2, vocab_size=400)
"""Sizes that NF4 divides."""
TOPK = Scheme(kind="topk", top_k=8, tail_samples=4)
SCHEMES = {"topk": TOPK, "sampled": Scheme(kind="sampled"), "full": Scheme(kind="full")}


def write_corpus(path: Path, documents: int = 24) -> Path:
    """Write documents of 30 to 500 bytes, one of them a conversation."""
    lines: list[dict[str, Any]] = [
        {"text": " ".join(f"def f{number * 7919 % 977}(x): return x + {step}" for step in steps)}
        for number in range(documents)
        for steps in [range(1 + number * 5 % 16)]
    ]
    lines[documents // 2] = {
        "messages": [
            {"role": "user", "content": "Add 1 and 2."},
            {"role": "assistant", "content": "x + 3"},
        ]
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_teacher(
    folder: Path,
    corpus: Path,
    seed: int = 0,
    head_scale: float = 20.0,
    sizes: ModelSizes = SIZES,
) -> Path:
    """Make a teacher; larger embeddings let it expect something of the next token."""
    model = init_model(corpus, folder, sizes, seed)
    file = model / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    table = "model.embed_tokens.weight"
    weights[table] = weights[table] * np.float32(head_scale)
    safetensors.numpy.save_file(weights, file, {"format": "pt"})
    return model


def write_padded(folder: Path, model: Path, rows: int, scale: float = 0.02) -> Path:
    """Copy a model and give it rows beyond its tokenizer, as published ones have."""
    shutil.copytree(model, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    file, table = folder / "model.safetensors", "model.embed_tokens.weight"
    weights = safetensors.numpy.load_file(file)
    more = np.random.default_rng(rows).normal(0, scale, (rows, weights[table].shape[1]))
    weights[table] = np.concatenate([weights[table], more.astype(np.float32)])
    safetensors.numpy.save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += rows
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_trimmed(folder: Path, model: Path, corpus: Path, size: int = 266) -> Path:
    trim_to_size(model, Documents([corpus]), size, folder)
    return folder


def wish(model: Path, corpus: Path, output: Path, **changes: Any) -> ScoringRequest:
    settings: dict[str, Any] = {
        "tokenizer": None,
        "scheme": TOPK,
        "max_seq_len": 64,
        "shard_bytes": 600,
        "dtype": "float32",
        "values": "float32",
    }
    return ScoringRequest(model=str(model), data=[corpus], output=output, **(settings | changes))


def load(assignment: Assignment, batch_tokens: int = 256) -> Teacher:
    import torch

    from trainer.distill.teacher.scoring import open_teacher
    from trainer.replica.backend import Compute

    torch.set_num_threads(1)
    return open_teacher(
        assignment.model_dir,
        assignment.vocabulary,
        assignment.description,
        Compute("cpu"),
        batch_tokens=batch_tokens,
    )


def teach(wanted: ScoringRequest, **options: Any) -> Assignment:
    """Score what is missing."""
    from trainer.distill.teacher.run import TeacherRun

    assignment = assign_request(wanted)
    opener: Callable[[], Teacher] = options.pop("open_teacher", lambda: load(assignment))
    TeacherRun(assignment, opener, **options).make_shards()
    return assignment
