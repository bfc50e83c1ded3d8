"""Soft targets in parts, and how much a divergence counts at each step."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.config.run import DistillationConfig
from trainer.data.soft_targets import SoftTargets, alpha_at


def test_a_part_has_its_own_entries() -> None:
    soft = SoftTargets(
        offsets=np.array([0, 0, 2, 3, 3, 5]),
        ids=np.array([7, 3, 1, 4, 2], np.int32),
        weights=np.array([0.5, 0.3, 1.0, 0.2, 0.1], np.float32),
        rest=np.array([0, 0.2, 0, 0, 0.7], np.float32),
        entropy=np.arange(5, dtype=np.float32),
        temperature=2.0,
    )
    part = soft.window(2, 5)
    assert part.offsets.tolist() == [0, 1, 1, 3]
    assert part.ids.tolist() == [1, 4, 2]
    assert part.weights.tolist() == soft.weights[2:].tolist()
    assert part.rest.tolist() == soft.rest[2:].tolist()
    assert part.entropy.tolist() == [2, 3, 4]
    assert part.temperature == 2.0
    assert soft.window(0, 5).ids.tolist() == soft.ids.tolist()
    assert soft.window(1, 1).offsets.tolist() == [0]


def test_alpha_goes_in_a_straight_line() -> None:
    kept = DistillationConfig(alpha=0.6)
    assert [alpha_at(kept, step, 9) for step in (1, 5, 9)] == [0.6] * 3
    falling = DistillationConfig(alpha=0.9, alpha_final=0.1)
    found = [alpha_at(falling, step, 5) for step in range(1, 6)]
    assert found == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert alpha_at(falling, 1, 1) == 0.9
    rising = DistillationConfig(alpha=0.0, alpha_final=1.0)
    assert [alpha_at(rising, step, 3) for step in (1, 2, 3)] == [0.0, 0.5, 1.0]
