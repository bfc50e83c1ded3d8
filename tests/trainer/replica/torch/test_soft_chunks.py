"""Whole distributions as matrices and as lists of entries say the same to a student."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.config.distillation import Divergence
from trainer.data.encoder import IGNORED
from trainer.data.soft_targets import SoftTargets
from trainer.data.tokens import Encoded
from trainer.replica.torch.batch import AllTokens, NamedTokens, SoftTargetRows, soft_rows
from trainer.replica.torch.kd_loss import KDWeights, row_losses

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
ROWS, VOCABULARY = 60, 400


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole(order: Tensor, temperature: float) -> SoftTargetRows:
    """Return a teacher's distributions, the tokens of each row in an order `[ROWS, VOCABULARY]`."""
    log_p = torch.log_softmax(draw(1, ROWS, VOCABULARY) / temperature, -1)
    return SoftTargetRows(
        np.arange(ROWS + 1, dtype=np.int64) * VOCABULARY,
        order.reshape(-1).int(),
        log_p.exp().gather(1, order).reshape(-1),
        torch.zeros(ROWS, dtype=log_p.dtype),
        -(log_p.exp() * log_p).sum(1),
    )


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_matrices_and_entries_agree(divergence: Divergence, temperature: float) -> None:
    """In fp64, where the order of a sum does not show."""
    by_id = torch.arange(VOCABULARY).expand(ROWS, -1)
    logits, wanted = draw(2, ROWS, VOCABULARY), torch.arange(ROWS)
    mix = KDWeights(0.7, temperature, divergence)
    parts = [
        whole(order, temperature).take_chunk(slice(0, ROWS), logits)
        for order in (by_id, by_id.flip(1))
    ]
    assert [type(part) for part in parts] == [AllTokens, NamedTokens]
    weights = parts[0].weights.clone()
    matrix, entries = (row_losses(logits.clone(), wanted, part, mix) for part in parts)
    for found, expected in zip(matrix, entries, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-12
    assert torch.equal(parts[0].weights, weights)  # the next step reads them again


def test_one_row_of_another_kind_makes_a_list() -> None:
    """All tokens in another order, or fewer of them, among rows that have all by id."""
    logits = draw(2, ROWS, VOCABULARY)
    swapped = torch.arange(VOCABULARY).repeat(ROWS, 1)
    swapped[40, :2] = torch.tensor([1, 0])
    rows = whole(swapped, 1.0)
    assert isinstance(rows.take_chunk(slice(0, 40), logits[:40]), AllTokens)
    assert isinstance(rows.take_chunk(slice(39, 41), logits[:2]), NamedTokens)
    assert isinstance(rows.take_chunk(slice(0, 40), draw(3, 40, VOCABULARY + 1)), NamedTokens)


def test_tokens_without_a_loss_leave_no_entries() -> None:
    counts = np.array([0, 3, 3, 3])
    soft = SoftTargets(
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        ids=np.tile(np.arange(3, dtype=np.int32), 3),
        weights=np.arange(9, dtype=np.float32),
        rest=np.zeros(4, np.float32),
        entropy=np.arange(4, dtype=np.float32),
        temperature=1.0,
    )
    ids = np.zeros(4, np.int32)
    all_wanted = np.array([IGNORED, 0, 0, 0], np.int32)
    some = np.array([IGNORED, 0, IGNORED, 0], np.int32)
    rows = soft_rows([Encoded(ids, all_wanted, soft), Encoded(ids, some, soft)])
    assert rows.offsets.tolist() == [0, 3, 6, 9, 12, 15]
    assert rows.ids.tolist() == [0, 1, 2] * 5
    assert rows.weights.tolist() == [*range(9), 0, 1, 2, 6, 7, 8]
    assert rows.entropy.tolist() == [1, 2, 3, 1, 3]
