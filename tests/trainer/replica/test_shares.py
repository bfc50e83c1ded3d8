"""Shares of a batch, however it is cut, have the gradient of the whole: a row for each setting."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica.driving import gradient, relative

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "A frozen": {"lora__freeze_a": True},
    "some layers": {"lora__layers_to_transform": [1]},
    "rsLoRA": {"lora__use_rslora": True},
}
"""What changes a gradient, and is the same on torch and wgpu."""


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_shares_add_up_to_the_whole(tiny: Tiny, task: str, name: str) -> None:
    replica, _ = tiny.start(task=task, **SETTINGS[name])
    batch = tiny.batch(7, task)
    whole, expected, _ = gradient(replica, batch)
    for cuts in ((0, 1, 7), (0, 3, 4, 7)):
        shares = [gradient(replica, batch[a:b]) for a, b in pairwise(cuts)]
        assert relative(sum(share for share, _, _ in shares), whole) < 1e-6
        assert sum(result.weight for _, result, _ in shares) == expected.weight
        losses = sum(result.loss_sum for _, result, _ in shares)
        assert losses == pytest.approx(expected.loss_sum, rel=1e-6)
