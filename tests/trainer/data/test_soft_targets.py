"""Soft targets in parts, and how much a divergence counts at each step."""

from __future__ import annotations

import numpy as np

from trainer.config.distillation import DistillationConfig
from trainer.data.soft_targets import SoftTargets, compute_alpha


def test_a_part_has_its_own_entries() -> None:
    soft = SoftTargets(
        offsets=np.array([0, 0, 2, 3, 3, 5]),
        ids=np.array([7, 3, 1, 4, 2], np.int32),
        weights=np.array([0.5, 0.3, 1.0, 0.2, 0.1], np.float32),
        rest=np.array([0, 0.2, 0, 0, 0.7], np.float32),
        entropy=np.arange(5, dtype=np.float32),
        temperature=2.0,
    )
    part = soft.slice_positions(2, 5)
    assert part.offsets.tolist() == [0, 1, 1, 3]
    assert part.ids.tolist() == [1, 4, 2]
    assert part.weights.tolist() == soft.weights[2:].tolist()
    assert part.rest.tolist() == soft.rest[2:].tolist()
    assert part.entropy.tolist() == [2, 3, 4]
    assert part.temperature == 2.0
    assert soft.slice_positions(0, 5).ids.tolist() == soft.ids.tolist()
    assert soft.slice_positions(1, 1).offsets.tolist() == [0]


def test_the_only_step_of_a_run_has_the_first_alpha() -> None:
    assert compute_alpha(DistillationConfig(alpha=0.9, alpha_final=0.1), 1, 1) == 0.9
