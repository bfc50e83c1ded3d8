"""The learning rate of each update: a warmup, then one of transformers' schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from trainer.config.optimizer import OptimizerConfig, Scheduler
from trainer.optimizer.learning_rate import compute_learning_rate

THEIRS: dict[Scheduler, tuple[str, str | None, dict[str, Any]]] = {
    "constant": ("constant_with_warmup", None, {}),
    "linear": ("polynomial", "lr_end", {"power": 1.0}),
    "cosine": ("cosine_with_min_lr", "min_lr", {}),
    "wsd": ("warmup_stable_decay", "min_lr_ratio", {"num_decay_steps": 30}),
}
"""Name, keyword of the final rate, and settings of each in transformers."""


@pytest.mark.parametrize("scheduler", THEIRS)
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_rates_are_those_of_transformers_one_step_on(scheduler: Scheduler, final: float) -> None:
    name, end, settings = THEIRS[scheduler]
    config = OptimizerConfig(
        learning_rate=1.0,
        scheduler=scheduler,
        warmup_ratio=0.1,
        decay_ratio=0.3 if scheduler == "wsd" else None,
        final_ratio=final,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, 10, 100, settings | ({end: final} if end else {}))
    for step in range(100):
        optimizer.step()
        theirs.step()
        if scheduler == "wsd" and step < 9:
            continue  # its warmup begins at the final rate
        expected = theirs.get_last_lr()[0]
        assert compute_learning_rate(step, 100, config) == pytest.approx(expected), step


def test_a_decay_that_nothing_has_is_refused() -> None:
    with pytest.raises(ValueError, match="decay_ratio is of scheduler wsd"):
        OptimizerConfig(decay_ratio=0.2)
    with pytest.raises(ValueError, match="more than all steps together"):
        OptimizerConfig(scheduler="wsd", warmup_ratio=0.5, decay_ratio=0.6)


def test_schedule_warms_up_then_falls_to_the_final_ratio():
    config = OptimizerConfig(learning_rate=2.0, warmup_ratio=0.1, final_ratio=0.25)
    rates = [compute_learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.5)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx((2.0 + 0.5) / 2, rel=1e-2), "half way down a cosine"


@pytest.mark.parametrize("scheduler", THEIRS)
@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 0.99])
def test_schedule_of_very_short_runs(scheduler: Scheduler, total: int, warmup: float):
    decay = 0.01 if scheduler == "wsd" else None
    config = OptimizerConfig(
        learning_rate=1.0, scheduler=scheduler, warmup_ratio=warmup, decay_ratio=decay
    )
    rates = [compute_learning_rate(step, total, config) for step in range(total)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert max(rates) == 1.0
