"""The loss of int8 with and without error feedback: SmolLM2-135M, three workers in one process.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/int8_feedback.py FOLDER LINES.jsonl --layers 10

All arms of a seed have the same start, rows and learning rate, and take each step in turn, so that
a run which is stopped early has an equal number of steps of each. A worker encodes the sum of its
rows' gradients, and the sum of all is encoded again, as the coordinator does. LoRA of rank 16 is
on all linears; the rows ask for the sections of Debian's packages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.real.data import described
from tests.real.peft_loop import Encoded, PeftLoop, encode
from trainer.config.run import load_config
from trainer.exchange.policies.feedback import ErrorFeedback
from trainer.exchange.protocol.codecs import SenderCodec, make_codec
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import AdamW, TrainState, square_sum

Float32 = NDArray[np.float32]
WORKERS, ROWS, WARMUP = 3, 6, 5
ARMS = {
    "fp32": ("fp32", SenderCodec),
    "int8 with": ("int8", ErrorFeedback),
    "int8 without": ("int8", SenderCodec),
}


@dataclass
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    state: TrainState
    optimizer: AdamW
    senders: list[SenderCodec]
    """Of each worker, and of the coordinator."""


def main() -> None:
    """Train all runs in lockstep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--layers", type=int, default=30, help="half of them the model's last")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two validations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.layers < 30:
        options.folder = cut_model(options.folder, options.lines.parent / "cut", options.layers)
    settings = {
        "model.path": str(options.folder),
        "data.train": "unused.jsonl",
        "task": "causal-lm",
        "method": "lora",
        "num_classes": None,
        "optimizer.learning_rate": 2e-3,
    }
    config = load_config(None, settings)
    layout = build_layout(options.folder, config)
    loop = PeftLoop(options.folder, config)
    lines = [row for row in described(900) if len(row.text) < 70]
    rows = encode(options.folder, [row.conversation for row in lines], 96)
    held_out, rows = rows[:48], rows[48:]
    sizes = [block.size for block in layout.blocks]
    runs = []
    for seed in range(3):
        start = initial_weights(
            layout, options.folder, config.with_settings({"training.seed": seed})
        )
        for arm, (codec, made) in ARMS.items():
            senders = [made(make_codec(codec), sizes) for _ in range(WORKERS + 1)]
            state = TrainState.create(start.copy())
            runs.append(Run(arm, seed, state, AdamW(config.optimizer, layout), senders))
    orders = [np.random.default_rng(seed).permutation(len(rows)) for seed in range(3)]
    begin = time.monotonic()
    with options.lines.open("w") as file:
        for step in range(options.steps):
            for run in runs:
                at = np.arange(step * ROWS, (step + 1) * ROWS) % len(rows)
                batch = [rows[index] for index in orders[run.seed][at]]
                found: dict[str, Any] = {"arm": run.arm, "seed": run.seed, "step": step + 1}
                rate = config.optimizer.learning_rate * min(1.0, (step + 1) / WARMUP)
                found["loss"] = take_step(loop, layout, run, batch, rate)
                if (step + 1) % options.every == 0:
                    loop.write(run.state.weights)
                    found["held_out"] = mean_loss(loop, held_out)
                found["seconds"] = round(time.monotonic() - begin, 1)
                print(json.dumps(found), file=file, flush=True)


def cut_model(source: Path, folder: Path, layers: int) -> Path:
    """Write a copy of the model with some of its first and last layers; return its folder."""
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    total = config["num_hidden_layers"]
    kept = [*range(layers // 2), *range(total - layers + layers // 2, total)]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        head, mark, rest = name.partition(".layers.")
        number, _, tail = rest.partition(".")
        if not mark:
            tensors[name] = tensor
        elif int(number) in kept:
            tensors[f"{head}{mark}{kept.index(int(number))}.{tail}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def take_step(loop: PeftLoop, layout: Any, run: Run, batch: list[Encoded], rate: float) -> float:
    """Return the mean loss of the batch, before the update."""
    loop.write(run.state.weights)
    total, loss, targets = np.zeros(layout.size, np.float32), 0.0, 0
    for worker in range(WORKERS):
        loop.model.zero_grad()
        for row in batch[worker::WORKERS]:
            summed, count = row_loss(loop, row)
            summed.backward()
            loss, targets = loss + summed.item(), targets + count
        total += send(run.senders[worker], layout, loop.gradient().astype(np.float32))
    average = send(run.senders[-1], layout, total) / np.float32(targets)
    scale = run.optimizer.clip_scale(square_sum(average) ** 0.5)
    run.optimizer.apply(run.state, average, rate, scale)
    return loss / targets


def send(sender: SenderCodec, layout: Any, values: Float32) -> Float32:
    """Return what arrives of a vector."""
    out = np.empty_like(values)
    for index, block in enumerate(layout.blocks):
        span = slice(block.start, block.start + block.size)
        codec, encoded = sender.encode(index, values[span])
        codec.decode(encoded, out[span])
    return out


def row_loss(loop: PeftLoop, row: Encoded) -> tuple[torch.Tensor, int]:
    """Return the summed loss of a row and its targets; logits of these alone."""
    inner = loop.model.base_model.model
    labels = row.labels[0, 1:]
    chosen = labels != -100
    hidden = inner.model(input_ids=row.ids).last_hidden_state[0, :-1][chosen]
    loss = functional.cross_entropy(inner.lm_head(hidden), labels[chosen], reduction="sum")
    return loss, int(chosen.sum())


def mean_loss(loop: PeftLoop, rows: list[Encoded]) -> float:
    """Return the mean loss; nothing is trained."""
    with torch.no_grad():
        pairs = [row_loss(loop, row) for row in rows]
    return sum(loss.item() for loss, _ in pairs) / sum(count for _, count in pairs)


if __name__ == "__main__":
    main()
