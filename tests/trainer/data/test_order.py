import hashlib

import numpy as np

from trainer.data.order import permute_epoch


def test_it_is_frozen():
    # Members of a run compute this on their own. A change here splits old and new releases:
    # python -c "from trainer.data.order import epoch_order as e; print(e(0, 0, 16).tolist())"
    assert permute_epoch(0, 0, 16).tolist() == FROZEN_FIRST
    assert permute_epoch(7, 3, 16).tolist() == FROZEN_OTHER
    whole = permute_epoch(2**64 + 5, 1, 100_000).astype("<i8").tobytes()
    assert hashlib.sha256(whole).hexdigest() == FROZEN_LONG


def test_it_visits_every_sample_once():
    for length in (0, 1, 2, 1000):
        order = permute_epoch(3, 1, length)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(length))


def test_seed_and_epoch_both_matter():
    orders = {permute_epoch(seed, epoch, 50).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


FROZEN_FIRST = [8, 10, 4, 7, 12, 3, 14, 6, 5, 2, 1, 0, 13, 9, 15, 11]
FROZEN_OTHER = [3, 0, 6, 11, 8, 13, 2, 12, 4, 1, 7, 9, 15, 14, 10, 5]
FROZEN_LONG = "3a84567e4aa26ce1ccb46fe813ecfac59f4663afc25e682a4fc7e923f32a3ff1"
