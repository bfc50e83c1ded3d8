"""Several samples in a row: fewer rows, and the loss and gradients of one sample a row."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.replica.driving import gradient, relative, start
from tests.trainer.replica.kept_tensors import kept_bytes
from trainer.data.tokens import Encoded
from trainer.model.layout import read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import plan_memory
from trainer.replica.microbatch import FIXED_COST, MicroBatchLimit, pack_rows, split_by_length
from trainer.replica.torch.batch import collate
from trainer.replica.torch.decoder import Backbone

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny
    from trainer.replica.torch.replica import TorchReplica


def test_samples_are_packed_where_they_first_fit() -> None:
    lengths = [3, 10, 4, 4, 2, 12, 1]
    rows = pack_rows(lengths, 10)
    assert rows == [[5], [1], [2, 3, 4], [0, 6]]
    assert pack_rows([], 10) == []
    assert pack_rows([2, 2], 1) == [[0], [1]]
    draw = np.random.default_rng(0)
    many = [int(length) for length in draw.integers(1, 41, 200)]
    rows = pack_rows(many, 40)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(many[index] for index in row) <= 40 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(many) // 40) + 1


def test_a_row_says_where_its_samples_begin() -> None:
    samples = [
        Encoded(np.arange(1, n, dtype=np.int32), np.arange(1, n, dtype=np.int32)) for n in (4, 3)
    ]
    micro = collate([samples, samples[1:]])
    assert micro.input_ids.tolist() == [[1, 2, 3, 1, 2], [1, 2, 0, 0, 0]]
    assert micro.labels.tolist() == [[1, 2, 3, 1, 2], [1, 2, -100, -100, -100]]
    assert micro.positions is not None
    assert micro.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert micro.lengths.tolist() == [5, 2]
    assert collate([samples[:1], samples[1:]]).positions is None


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_packing_changes_neither_loss_nor_gradient(
    tiny: Tiny, model_type: str, method: str
) -> None:
    folder = tiny.model(model_type)
    settings = {"task": "causal-lm", "method": method, "data__max_seq_len": 64}
    batch = tiny.batch(12, "causal-lm")
    plain, _ = tiny.start(folder, **settings)
    packed, _ = tiny.start(folder, **settings, training__pack=True)
    expected, theirs, _ = gradient(plain, batch)
    for limit in (packed.split.limit, MicroBatchLimit(1, 1000), MicroBatchLimit(100, 128)):
        packed.split.limit = limit
        found, mine, _ = gradient(packed, batch)
        assert relative(found, expected) < 1e-6
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-6)
        assert (mine.weight, mine.tokens) == (theirs.weight, theirs.tokens)
    scored = packed.evaluate(batch)
    assert scored.loss_sum == pytest.approx(plain.evaluate(batch).loss_sum, rel=1e-6)


def test_a_sample_does_not_see_its_neighbours(tiny: Tiny) -> None:
    """What comes first in a row says nothing of the loss of what follows."""
    replica, _ = tiny.start(task="causal-lm", data__max_seq_len=64, training__pack=True)
    first, second, other = tiny.batch(3, "causal-lm")
    assert len(first.input_ids) + len(second.input_ids) <= 64
    one = replica.evaluate([second]).loss_sum
    for neighbour in (first, other):
        alone = replica.evaluate([neighbour]).loss_sum
        assert replica.evaluate([neighbour, second]).loss_sum == pytest.approx(
            alone + one, rel=1e-6
        )


def test_rows_are_fewer(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, _ = tiny.start(task="causal-lm", data__max_seq_len=64, training__pack=True)
    batch = tiny.batch(12, "causal-lm")
    shapes: list[tuple[int, ...]] = []
    forward = Backbone.forward

    def watched(model: Backbone, **arguments: Any) -> object:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(model, **arguments)

    monkeypatch.setattr(Backbone, "forward", watched)
    replica.split.limit = MicroBatchLimit(100, 10_000)
    replica.evaluate(batch)
    ((rows, width),) = shapes
    tokens = sum(len(sample.input_ids) for sample in batch)
    assert width <= 64
    assert rows <= -(-tokens // 64) + 1 < 12


@pytest.mark.parametrize("layers", [2, 4])
def test_masks_count_in_the_memory_plan(tiny: Tiny, layers: int) -> None:
    """What autograd keeps of a further row, beyond that of a row with one sample."""
    folder = tiny.model(num_hidden_layers=layers)
    sizes: dict[bool, tuple[float, int]] = {}
    for packed in (False, True):
        config = tiny.config(folder, task="causal-lm", data__max_seq_len=256, training__pack=packed)
        replica, _ = start(folder, config)
        length = 64 if packed else 256
        sample = Encoded(np.arange(length, dtype=np.int32), np.arange(length, dtype=np.int32))
        few, more = (saved(replica, [sample] * (rows * 256 // length)) for rows in (2, 4))
        shape, headers = read_shape(folder), read_headers(folder)
        plan = plan_memory(
            shape, headers, replica.layout, config, accelerator=False, recompute=False
        )
        sizes[packed] = (more - few) / 512, plan.per_token
    measured = sizes[True][0] - sizes[False][0]
    planned = sizes[True][1] - sizes[False][1]
    assert 0 < measured <= planned <= 1.6 * measured


def saved(replica: TorchReplica, batch: list[Encoded]) -> int:
    """Return the bytes that autograd keeps of a batch."""
    return kept_bytes(lambda: replica.accumulate(batch))


def cost(lengths: list[int], groups: list[list[int]], limit: MicroBatchLimit) -> float:
    padded = sum(len(group) * max(1, *(lengths[i] for i in group), 1) for group in groups)
    return padded + FIXED_COST * limit.tokens * len(groups)


def fits(lengths: list[int], group: list[int], limit: MicroBatchLimit) -> bool:
    rows = len(group)
    padded = rows * max(lengths[index] for index in group)
    return rows == 1 or (rows <= limit.samples and padded <= limit.tokens)


@pytest.mark.parametrize("seed", range(30))
def test_no_split_of_the_sorted_samples_costs_less(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice((1, 7, 60, 64, 120, 300)) for _ in range(draw.randint(1, 9))]
    limit = MicroBatchLimit(draw.choice((2, 99)), draw.choice((128, 256, 1024)))
    found = split_by_length(lengths, limit)
    order = [index for group in found for index in group]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    assert all(fits(lengths, group, limit) for group in found)
    costs: list[float] = []
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        edges = [0, *(at for at, cut in enumerate(cuts, start=1) if cut), len(order)]
        groups = [order[start:stop] for start, stop in itertools.pairwise(edges)]
        if all(fits(lengths, group, limit) for group in groups):
            costs.append(cost(lengths, groups, limit))
    assert cost(lengths, found, limit) == pytest.approx(min(costs))


def test_nothing_is_split_into_nothing() -> None:
    assert split_by_length([], MicroBatchLimit(9, 1024)) == []
