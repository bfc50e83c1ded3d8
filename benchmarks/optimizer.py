"""One optimizer update: our AdamW, compiled and in NumPy, against torch.optim.AdamW, in one run.

    python benchmarks/optimizer.py [--parameters 6000000] [--threads 2]

Prints milliseconds (median) and the ratio; writes benchmarks/results/optimizer.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trainer.config.optimizer import OptimizerConfig
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.system.passes import compiled
from trainer.system.passes.compiled import Passes

RESULT = Path(__file__).parent / "results" / "optimizer.json"
TARGET_MS = 20.0


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=6_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    size: int = arguments.parameters
    draw = np.random.Generator(np.random.Philox(0))
    weights = draw.random(size, dtype=np.float32) - 0.5
    gradient = (draw.random(size, dtype=np.float32) - 0.5) * np.float32(1e-2)

    # Interleaved, so that other load affects all alike.
    candidates = {
        "motley": our_update(weights, gradient, compiled.PASSES),
        "numpy": our_update(weights, gradient, None),
        "torch_foreach": torch_update(weights, gradient, fused=False),
        "torch_fused": torch_update(weights, gradient, fused=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(arguments.repeats + 3):
        for name, update in candidates.items():
            begin = time.perf_counter()
            update()
            if repeat >= 3:
                seconds[name].append(time.perf_counter() - begin)

    median = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    report = {
        "parameters": size,
        "torch_threads": arguments.threads,
        "milliseconds": {name: round(value, 2) for name, value in median.items()},
        "ratio_to_torch_foreach": round(median["motley"] / median["torch_foreach"], 2),
        "ratio_to_torch_fused": round(median["motley"] / median["torch_fused"], 2),
        "target_milliseconds": TARGET_MS,
        "meets_target": median["motley"] <= TARGET_MS * size / 6_000_000,
        "machine": platform.machine(),
    }
    for name, value in median.items():
        print(f"{name:14} {value:7.2f} ms")
    print(f"motley / torch fused: {report['ratio_to_torch_fused']}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def our_update(
    weights: np.ndarray, gradient: np.ndarray, passes: Passes | None
) -> Callable[[], None]:
    """Return one update of ours; 1024-wide matrices, one norm vector a block."""
    slots: list[TensorSlot] = []
    start = 0
    while start < weights.size:
        for shape in ((512, 1024), (1024,)):
            stop = min(start + int(np.prod(shape)), weights.size)
            if stop > start:
                shape = shape if stop - start == np.prod(shape) else (1, stop - start)
                slots.append(TensorSlot(f"tensor{len(slots)}", shape, start))
            start = stop
    block = Block(0, "layers.0", 0, weights.size, tuple(slots))
    optimizer = AdamW(OptimizerConfig(), GradientLayout((block,), num_layers=1))
    state = TrainState.fresh(weights.copy())

    def update() -> None:
        compiled.PASSES = passes
        optimizer.apply(state, gradient, 1e-4, 0.5)

    return update


def torch_update(weights: np.ndarray, gradient: np.ndarray, *, fused: bool) -> Callable[[], None]:
    """Return one update of torch's AdamW, clip scale included, on the same numbers."""
    pieces = torch.from_numpy(weights.copy()).split(512 * 1024)
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    gradients = torch.from_numpy(gradient).split(512 * 1024)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused, foreach=not fused)

    def update() -> None:
        for parameter, piece in zip(parameters, gradients, strict=True):
            parameter.grad = piece * 0.5
        optimizer.step()

    return update


if __name__ == "__main__":
    main()
