"""A whole training step on Vulkan against torch in the same run: time, round trips, memory.

    python benchmarks/wgpu_step.py [--shape layer|0.6b|4b] [--tokens 256] [--against cpu|cuda|none]
                                   [--gpu NAME] [--quantization nf4|none] [--repeats 3]
                                   [--models DIR]

`layer` is one decoder layer of Qwen3-0.6B with a small vocabulary, LoRA of rank 16 on all seven
linears; the other shapes are whole models with random weights, LoRA on q and v. torch computes the
same step twice: from the same NF4 weights, and from dense fp32 ones, its best case. Also measured:
encoding a recording of 3,900 dispatches. DIR keeps the model for the next call, as in one_card.py.
Writes benchmarks/results/wgpu_step-SHAPE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig.model_folders import SHAPES, model_folder
from rig.report import RESULTS

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig, load_config
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.replica.base import Replica
from trainer.replica.torch.replica import TorchReplica
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
from trainer.replica.wgpu.kernels.elementwise import copy
from trainer.replica.wgpu.planning import plan_memory
from trainer.replica.wgpu.replica import WgpuReplica

DISPATCHES = 3900


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="layer")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--against", choices=["cpu", "cuda", "none"], default="cpu")
    parser.add_argument("--gpu", default="", help="index, PCI address or part of the name")
    parser.add_argument("--quantization", choices=["nf4", "none"], default="nf4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=Path, help="where model folders are, or come")
    arguments = parser.parse_args()
    try:
        device = Device(select_adapter(arguments.gpu, allow_software=True))
    except DeviceError as error:
        print(f"skipped: {error}")
        return
    with model_folder(arguments.models, arguments.shape) as folder:
        report = measure(device, folder, arguments)
    for key, value in report.items():
        print(f"{key:32} {value}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"wgpu_step-{arguments.shape}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(device: Device, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, ratios, counts and bytes."""
    config = run_config(folder, arguments)
    layout = build_layout(folder, config)
    weights = initial_weights(layout, folder, config)
    batch = [sample(arguments.tokens, SHAPES[arguments.shape]["vocab_size"])]
    began = time.perf_counter()
    replica = WgpuReplica(folder, config, layout, device)
    loaded = time.perf_counter() - began
    replica.write_trainable(weights)
    others: dict[str, Replica] = {}
    if arguments.against != "none":
        threads = torch.get_num_threads()
        kinds = {"torch_nf4": "nf4", "torch_dense": "none"} if arguments.shape == "layer" else {}
        for name, kind in (kinds or {"torch": arguments.quantization}).items():
            other = config.model_copy(
                update={"model": config.model.model_copy(update={"quantization": kind})}
            )
            others[name] = TorchReplica(folder, other, layout, arguments.against, threads)
            others[name].write_trainable(weights)

    first = step(replica, batch)
    counters = device.counters
    before = (counters.uploads, counters.readbacks, counters.submits, counters.dispatches)
    seconds: dict[str, list[float]] = {"wgpu": [], **{name: [] for name in others}}
    for other in others.values():
        step(other, batch)
    for _ in range(arguments.repeats):  # interleaved: other load affects all alike
        for name, one in {"wgpu": replica, **others}.items():
            seconds[name].append(step(one, batch))
    after = (counters.uploads, counters.readbacks, counters.submits, counters.dispatches)
    each = [(b - a) // arguments.repeats for a, b in zip(before, after, strict=True)]
    best = {name: min(times) for name, times in seconds.items()}
    planned = plan_memory(folder, config, layout, 1, recompute=False)
    return {
        "adapter": device.adapter.key,
        "shape": arguments.shape,
        "tokens": arguments.tokens,
        "quantization": arguments.quantization,
        "load_seconds": round(loaded, 2),
        "first_step_seconds": round(first, 2),
        **{f"{name}_seconds": round(value, 4) for name, value in best.items()},
        **{
            f"ratio_to_{name}": round(best["wgpu"] / value, 2)
            for name, value in best.items()
            if name != "wgpu"
        },
        "tokens_a_second": round(arguments.tokens / best["wgpu"], 1),
        **dict(zip(("uploads", "readbacks", "submits", "dispatches"), each, strict=True)),
        "planned_bytes": planned.total,
        "allocated_bytes": device.allocated,
        "encode_milliseconds": round(encode_milliseconds(device), 2),
        "encoded_dispatches": DISPATCHES,
    }


def run_config(folder: Path, arguments: argparse.Namespace) -> RunConfig:
    """Return the config of the step."""
    targets = LINEARS if arguments.shape == "layer" else ("q_proj", "v_proj")
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.quantization": arguments.quantization,
            "model.dtype": "float32" if arguments.shape == "layer" else "bfloat16",
            "data.train": "unused.jsonl",
            "data.max_seq_len": arguments.tokens,
            "task": "causal-lm",
            "lora.target_modules": list(targets),
            "training.micro_batch_size": 1,
        },
    )


def sample(tokens: int, vocab_size: int) -> Encoded:
    """Return random tokens of which the last 16 are predicted."""
    ids = np.random.default_rng(0).integers(0, vocab_size, tokens).astype(np.int32)
    labels = ids.copy()
    labels[:-16] = IGNORED
    return Encoded(ids, labels)


def step(replica: Replica, batch: Sequence[Encoded]) -> float:
    """Return the seconds of one forward and backward, gradients on the host."""
    began = time.perf_counter()
    result = replica.forward_backward(batch, lambda _index, _gradient: None)
    assert math.isfinite(result.loss_sum), result
    return time.perf_counter() - began


def encode_milliseconds(device: Device) -> float:
    """Return the best time to encode 3,900 dispatches of one small kernel on changing arrays."""
    graph = Graph(device)
    arrays: list[Array] = [device.create_array((64,)) for _ in range(64)]
    for number in range(DISPATCHES):
        copy(graph, arrays[number % 63], arrays[number % 63 + 1])
    graph.run()
    best = math.inf
    for _ in range(5):
        encoder = device.create_encoder()
        began = time.perf_counter()
        graph.encode(encoder)
        best = min(best, time.perf_counter() - began)
        device.submit(encoder)
        device.read(arrays[0])
    return 1e3 * best


if __name__ == "__main__":
    main()
