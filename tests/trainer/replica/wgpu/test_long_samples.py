"""A model on samples so long that attention's scores of one of them exceed a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.replica.driving import gradient, relative
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.layers.attention import SCORE_BYTES, Attention

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

pytestmark = pytest.mark.long

LENGTH = 2304
ATTENTION = Attention(batch=1, num_heads=4, num_kv_heads=2, length=LENGTH, head_dim=16)
"""That of the tiny model, whose widest activation is 128 columns, also with heads of 32."""
LEAST = 4 * LENGTH * 128
"""Bytes that a kernel's argument must span."""


@pytest.mark.parametrize(
    ("limit", "windows", "head_dim"),
    [
        pytest.param(None, 2, 16, id="a head at a time"),
        pytest.param(LEAST, 2 * 36, 16, id="128 rows at a time"),
        pytest.param(None, 2, 32, id="forward in one kernel, where it serves"),
    ],
)
def test_loss_and_gradients_are_those_of_torch(
    device: Device, tiny: Tiny, limit: int | None, windows: int, head_dim: int
) -> None:
    folder = tiny.model(head_dim=head_dim)
    settings: dict[str, Any] = {"task": "causal-lm", "data__max_seq_len": LENGTH}
    ids = np.random.default_rng(4).integers(0, 300, LENGTH).astype(np.int32)
    labels = ids.copy()
    labels[:-64] = IGNORED  # of the last positions, which see all others
    batch = [Encoded(ids, labels)]
    theirs, expected, _ = gradient(tiny.start(folder, **settings)[0], batch)

    where = Device(device.adapter, binding_limit=limit) if limit else device
    assert len(list(ATTENTION.iter_windows(min(where.binding_limit, SCORE_BYTES)))) == windows
    replica, _ = tiny.wgpu(where, folder, **settings)
    mine, result, _ = gradient(replica, batch)
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert relative(mine, theirs) < 1e-5
    assert replica.evaluate(batch).loss_sum == pytest.approx(result.loss_sum, rel=1e-6)
