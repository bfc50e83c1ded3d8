"""A fixed optimizer trajectory: prints its digest and the CPU features NumPy used.

Frozen numerics: `python tests/contracts/optimizer_trajectory.py --freeze` rewrites
optimizer_trajectory.json. Do that only for a deliberate change of the optimizer's arithmetic,
which makes all older checkpoints continue differently.
"""

import json
import sys
from pathlib import Path

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from trainer.config.optimizer import OptimizerConfig
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import AdamW, TrainState, weights_digest

FROZEN = Path(__file__).with_suffix(".json")
STEPS = 50


def layout() -> GradientLayout:
    """Matrices and vectors of odd sizes, longer than one chunk, so that SIMD tails are used."""
    shapes = ((331, 257), (257,), (17, 19), (1,), (3, 7, 11))
    slots, start = [], 0
    for index, shape in enumerate(shapes):
        slots.append(TensorSlot(f"tensor{index}", shape, start))
        start = slots[-1].stop
    return GradientLayout((Block(0, "layers.0", 0, start, tuple(slots)),), num_layers=1)


def uniforms(draw: np.random.Philox, count: int) -> np.ndarray:
    """Floats in [-0.5, 0.5) from raw Philox integers: no libm, the same bits everywhere."""
    integers = draw.random_raw(count) >> np.uint64(40)
    return integers.astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


def trajectory() -> dict[str, object]:
    """Return the digests after some updates with gradients of widely different magnitudes."""
    draw = np.random.Philox(key=20_24)
    shape = layout()
    optimizer = AdamW(OptimizerConfig(learning_rate=3e-3, weight_decay=0.1), shape)
    state = TrainState.create(uniforms(draw, shape.size))
    digests = {}
    for step in range(STEPS):
        gradient = uniforms(draw, shape.size) * np.float32(10.0 ** (step % 9 - 6))
        optimizer.apply(state, gradient, 3e-3 / (1 + step), 1.0 if step % 3 else 0.37)
        if step + 1 in (1, 10, STEPS):
            digests[str(step + 1)] = weights_digest(state.weights)
    return {"weights": digests, "state": state.compute_digest()}


if __name__ == "__main__":
    result = trajectory()
    if "--freeze" in sys.argv:
        FROZEN.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    features = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    sys.stdout.write(json.dumps({**result, "features": features}) + "\n")
