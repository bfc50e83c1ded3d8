"""AdamW without torch's class computes what the class does."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.optimizer import OptimizerConfig
from trainer.replica.torch.adamw import FusedAdamW

RATES = (1e-2, 3e-3, 7e-3)


def test_it_is_torchs_bit_for_bit() -> None:
    settings = OptimizerConfig(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
    ours, theirs = _parameters(), _parameters()
    optimizer = FusedAdamW(settings, [(ours[:2], True), (ours[2:], False), ([], True)])
    optimizer.reset_moments()
    optimizer.resume_at(5)
    reference = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        fused=True,
    )
    for each in theirs:
        reference.state[each] = {
            "step": torch.tensor(5.0),
            **{moment: torch.zeros_like(each) for moment in ("exp_avg", "exp_avg_sq")},
        }
    for number, rate in enumerate(RATES):
        for each in (*ours, *theirs):
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
        ours[1].grad = theirs[1].grad = None  # it has none, and stays
        optimizer.step(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert all(map(torch.equal, ours, theirs))
    assert torch.equal(ours[1], _parameters()[1])
    assert not torch.equal(ours[0], _parameters()[0])


def _parameters() -> list[nn.Parameter]:
    noise = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=noise)) for shape in ((3, 4), (2,), (5,))]
