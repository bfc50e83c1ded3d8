"""Planned memory against the peak of real steps: the torch replica, ranks, and the wgpu engine.

    python benchmarks/plan.py [--engine torch|ranks|wgpu] [--shape NAME] [--method lora|qlora|full]

Each case runs in a process of its own. Of the torch replica the peak is that of the process's own
resident pages above what its libraries took before the model was loaded; large
blocks go back to the kernel when they are freed, so that pages are tensors. `ranks` are two
processes with gloo under each strategy, of which the one that takes most counts. JSON:
benchmarks/results/plan-ENGINE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.plan_ranks import STRATEGIES, weigh_ranks
from rig.report import Ratio, Report
from rig.resident import EXACT, Peak, own_bytes

from benchmarks.rig.random_model import write_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3, hidden 512": {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
    },
    "llama, hidden 1024": {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 8_000,
        "tie_word_embeddings": True,
    },
    "qwen2, hidden 768": {
        "model_type": "qwen2",
        "hidden_size": 768,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16_000,
        "tie_word_embeddings": True,
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"model.quantization": "nf4"},
    "full": {"method": "full"},
}
ROWS = 2
LENGTHS = {"torch": 512, "wgpu": 128}
"""Tokens of a row; a software device computes fewer in the same time."""
WITHIN = 1.10
ENGINES = ("torch", "ranks", "wgpu")


def main() -> int:
    """Run every case, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--method", choices=list(METHODS), action="append")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(**json.loads(arguments.case))))
        return 0
    missed = 0
    for engine in arguments.engine or ENGINES:
        report = Report(f"plan-{engine}")
        for shape in arguments.shape or SHAPES:
            for method in arguments.method or METHODS:
                for name, found in weigh(engine, shape, method):
                    worse = max(found["planned"] / found["peak"], found["peak"] / found["planned"])
                    title = f"{name}, {shape}, {method}: planned and measured"
                    report.add(Ratio(title, worse, "the lesser of both", target=WITHIN), **found)
        missed |= report.write()
    return missed


def weigh(engine: str, shape: str, method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cases of an engine with planned and peak bytes."""
    if engine == "ranks":
        for strategy in STRATEGIES:
            yield strategy, weigh_ranks(SHAPES[shape], METHODS[method], strategy)
        return
    case = {"engine": engine, "shape": shape, "method": method}
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **EXACT},
    )
    yield engine, json.loads(done.stdout.splitlines()[-1])


def measure(engine: str, shape: str, method: str) -> dict[str, Any]:
    """Return planned and peak bytes of a step."""
    from trainer.config.run import load_config
    from trainer.model.layout import build_layout

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch), SHAPES[shape], "F32")
        config = load_config(
            None,
            {
                "model.path": str(folder),
                "data.train": "none",
                "task": "causal-lm",
                "data.max_seq_len": LENGTHS[engine],
                "training.micro_batch_size": ROWS,
                **METHODS[method],
            },
        )
        layout = build_layout(folder, config)
        run = on_torch if engine == "torch" else on_vulkan
        return run(folder, config, layout)


def samples(vocab: int, length: int) -> list[Any]:
    """Return one micro-batch of the longest samples."""
    import numpy as np

    from trainer.data.tokens import Encoded

    draw = np.random.default_rng(0)
    ids = [draw.integers(1, vocab, length).astype(np.int32) for _ in range(ROWS)]
    return [Encoded(each, each.astype(np.int32)) for each in ids]


def on_torch(folder: Path, config: Any, layout: Any) -> dict[str, Any]:
    """Return planned and peak bytes of the torch replica on the CPU, alone."""
    import bitsandbytes  # noqa: F401  # loaded before the first look: its own memory is not the model's
    import torch

    from trainer.model.initialization import initial_weights
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import make_training_setup
    from trainer.planning.strategy import Strategy
    from trainer.replica.torch.replica import TorchReplica

    shape = read_shape(folder)
    weights = initial_weights(layout, folder, config)
    batch = samples(shape.vocab, config.data.max_seq_len)
    torch.nn.functional.silu(torch.ones(64, 64, requires_grad=True)).sum().backward()
    before = own_bytes()
    replica = TorchReplica(folder, config, layout, threads=1)
    replica.write_trainable(weights)
    with Peak() as peak:
        replica.forward_backward(batch, lambda *_: None)
    training = make_training_setup(config, accelerator=False, recompute=False)
    parts = plan_memory_by_part(shape, replace(training, rows=ROWS), Strategy(data="motley"))
    size = parts.bytes_by_part()
    planned = sum(size.values()) - size["optimizer"]  # the exchange's, which is not here
    return {"planned": planned, "peak": peak.bytes - before, "parts": size}


def on_vulkan(folder: Path, config: Any, layout: Any) -> dict[str, Any]:
    """Return planned and taken bytes of the wgpu engine on the first Vulkan device."""
    from trainer.model.initialization import initial_weights
    from trainer.replica.wgpu.gpu.device import Device
    from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
    from trainer.replica.wgpu.planning import plan_memory
    from trainer.replica.wgpu.replica import WgpuReplica

    device = Device(select_adapter("", allow_software=True))
    before = device.allocated
    replica = WgpuReplica(folder, config, layout, device)
    replica.write_trainable(initial_weights(layout, folder, config))
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    replica.forward_backward(samples(vocab, config.data.max_seq_len), lambda *_: None)
    staging = sum(4 * replica._loaded.slots.padded_size(block.index) for block in layout.blocks)
    planned = plan_memory(folder, config, layout, ROWS, recompute=False)
    return {
        "planned": planned.total,
        "peak": device.allocated - before - staging,
        "parts": planned.parts,
    }


if __name__ == "__main__":
    sys.exit(main())
