"""Inner steps against plain AdamW, and whole rounds against DiLoCo written down in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.exchange.exact_problem import tiny_layout
from trainer.config.optimizer import OptimizerConfig
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.optimizer.nesterov import OuterNesterov
from trainer.replica.base import OnBlock, StepResult
from trainer.run import inner_steps
from trainer.run.inner_steps import InnerSteps, split_into_steps

LAYOUT = tiny_layout()
SETTINGS = OptimizerConfig(learning_rate=0.05, weight_decay=0.1, max_grad_norm=1.0, beta2=0.95)
SAMPLES = np.random.default_rng(5).standard_normal((48, LAYOUT.size)).astype(np.float32)
START = np.random.default_rng(6).standard_normal(LAYOUT.size).astype(np.float32)


class Quadratic:
    """loss(sample) = |weights - sample|^2 / 2; a sample is a vector `[N]`, or a weight of 0."""

    layout = LAYOUT
    device = "cpu"

    def __init__(self) -> None:
        self.weights = np.zeros(LAYOUT.size, np.float32)
        self.batches: list[int] = []

    def write_trainable(self, flat: np.ndarray) -> None:
        self.weights[...] = flat

    def forward_backward(
        self, batch: Sequence[Any], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        self.batches.append(len(batch))
        away = self.weights - np.stack(batch)
        gradient = away.sum(0, dtype=np.float64).astype(np.float32)
        for index in LAYOUT.send_order:
            block = LAYOUT.blocks[index]
            on_block(index, gradient[block.start : block.stop])
        return StepResult(float((away**2).sum() / 2), len(batch), len(batch), 0.0)

    def evaluate(self, batch: Sequence[Any]) -> Any:
        raise NotImplementedError


def plan(inner: int, rounds: int = 3, batch: int = 4, flush: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(inner * rounds * batch, batch, 1, None, inner, flush)


def worker(plan: StepPlan, state: TrainState | None = None) -> tuple[InnerSteps, TrainState]:
    state = state or TrainState.create(START.copy())
    return InnerSteps(Quadratic(), SETTINGS, plan, state), state  # pyright: ignore[reportArgumentType]


def summed(moved: inner_steps.InnerStepsResult, blocks: int) -> np.ndarray:
    return np.concatenate([moved.block(index) for index in range(blocks)])


def mean(total: Any) -> Any:
    """Return the mean over the 16 samples of a round, fp32."""
    return total / np.float32(16)


def plain_steps(steps: StepPlan, numbers: range) -> TrainState:
    """Return the state after AdamW steps on consecutive batches, as one process takes them."""
    state, optimizer, replica = (
        TrainState.create(START.copy()),
        AdamW(SETTINGS, LAYOUT),
        Quadratic(),
    )
    gradient = np.empty(LAYOUT.size, np.float32)

    def keep(index: int, part: np.ndarray) -> None:
        block = LAYOUT.blocks[index]
        gradient[block.start : block.stop] = part

    for number in numbers:
        batch = SAMPLES[number * 4 : number * 4 + 4]
        replica.write_trainable(state.weights)
        replica.forward_backward(list(batch), keep)
        gradient /= np.float32(4)
        scale = optimizer.clip_scale(float(np.linalg.norm(gradient.astype(np.float64))))
        rate = compute_learning_rate(number, steps.total_inner, SETTINGS)
        optimizer.apply(state, gradient, rate, scale)
    return state


def test_rounds_go_on_with_the_moments_of_the_ordinary_steps_before_them():
    """One worker, a mean of weights: three AdamW steps and two rounds are eleven AdamW steps."""
    steps = plan(inner=4).with_outer_steps((3, 4))
    inner, state = worker(steps, plain_steps(steps, range(3)))
    update = OuterNesterov(1.0, 0.0, LAYOUT)
    assert [len(steps.find_inner_steps(step)) for step in range(6)] == [1, 1, 1, 4, 4, 1]
    for step in (3, 4):
        at = steps.find_samples(step)
        moved = inner.train_shard(list(SAMPLES[at.start : at.stop]), step, 4)
        update.apply(state, mean(summed(moved, 4)))
        inner.on_outer_update(step)
    expected = plain_steps(steps, range(11)).weights
    np.testing.assert_allclose(state.weights, expected, rtol=0, atol=1e-6)


def torch_diloco(rounds: int, shares: tuple[int, int], inner_batch: int) -> np.ndarray:
    """Return the weights after rounds of two workers, with torch's AdamW and SGD alone."""
    per_round = sum(shares)
    decays = np.zeros(LAYOUT.size, bool)
    for slot in LAYOUT.iter_tensors():
        decays[slot.start : slot.stop] = len(slot.shape) >= 2
    matrix, vector = torch.from_numpy(decays), torch.from_numpy(~decays)
    common = torch.from_numpy(START.copy()).requires_grad_()
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    sizes = int(matrix.sum()), int(vector.sum())
    own = [[torch.nn.Parameter(torch.empty(size)) for size in sizes] for _ in shares]
    inner = [
        torch.optim.AdamW(
            [{"params": [a], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0}],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        for a, b in own
    ]
    planned = per_round // inner_batch // len(shares)
    for task in range(rounds):
        start, mean = task * per_round, torch.zeros(LAYOUT.size)
        for share, (a, b), optimizer in zip(shares, own, inner, strict=True):
            with torch.no_grad():
                a.copy_(common[matrix])
                b.copy_(common[vector])
            steps = share // inner_batch
            for index in range(steps):
                batch = torch.from_numpy(SAMPLES[start : start + inner_batch])
                start += inner_batch
                at = task * planned + index * planned // steps
                for group in optimizer.param_groups:
                    group["lr"] = compute_learning_rate(at, 12, SETTINGS)
                optimizer.zero_grad()
                whole = torch.empty(LAYOUT.size)
                whole[matrix], whole[vector] = a, b
                loss = ((whole - batch) ** 2).sum() / 2 / inner_batch
                loss.backward()
                torch.nn.utils.clip_grad_norm_([a, b], 1.0)
                optimizer.step()
            with torch.no_grad():
                whole = torch.empty(LAYOUT.size)
                whole[matrix], whole[vector] = a, b
                mean += share * (common - whole) / per_round
        common.grad = mean
        outer.step()
    return common.detach().numpy()


@pytest.mark.parametrize("shares", [(8, 8), (12, 4)])
def test_two_workers_are_diloco_as_torch_does_it(shares: tuple[int, int]):
    """The faster one takes more inner steps of the same size, and weighs more."""
    steps = plan(inner=4)
    workers = [worker(steps) for _ in shares]
    outer = OuterNesterov(0.7, 0.9, LAYOUT)
    for step in range(2):
        start, total = steps.find_samples(step).start, np.zeros(LAYOUT.size, np.float32)
        for share, (inner, _) in zip(shares, workers, strict=True):
            moved = inner.train_shard(list(SAMPLES[start : start + share]), step, 2)
            total += summed(moved, 4)
            start += share
        for inner, state in workers:
            outer.apply(state, mean(total))
            inner.on_outer_update(step)
    first, second = (state.weights for _, state in workers)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, torch_diloco(2, shares, 2), rtol=0, atol=2e-6)


def test_a_settled_round_leaves_nothing_private():
    """Who worked on, and who joins with the common state, do the same from there on."""
    steps = plan(inner=4, flush=(2,))
    inner, state = worker(steps)
    outer = OuterNesterov(0.7, 0.9, LAYOUT)
    assert [inner.order_blocks(step) for step in range(2)] == [
        (1, 0, 3, 2),
        (1, 0, 3, 2, 5, 4, 7, 6),
    ]
    for step in range(2):
        moved = inner.train_shard(list(SAMPLES[:16]), step, 4)
        average = mean(summed(moved, 8 if steps.flushes_residuals(step) else 4))
        outer.apply(state, average)
        inner.on_outer_update(step)
    arrays = (state.weights.copy(), state.first_moment.copy(), state.second_moment.copy())
    joiner, _ = worker(steps, TrainState(*arrays, step=2))
    one, other = (each.train_shard(list(SAMPLES[16:32]), 2, 4) for each in (inner, joiner))
    np.testing.assert_array_equal(summed(one, 4), summed(other, 4))
    np.testing.assert_array_equal(summed(one, 8)[LAYOUT.size :], summed(other, 8)[LAYOUT.size :])


def test_second_moments_of_workers_of_different_speed_have_one_bias():
    """Constant squared gradients: their average must be what so many planned steps gather."""
    steps = plan(inner=4, rounds=1)
    away = np.full(LAYOUT.size, 3.0, np.float32)

    class Constant(Quadratic):
        def forward_backward(self, batch: Any, on_block: OnBlock, alpha: Any = None) -> StepResult:
            for block in LAYOUT.blocks:
                on_block(block.index, away[block.start : block.stop] * len(batch))
            return StepResult(0.0, len(batch), 1, 0.0)

    settings = SETTINGS.model_copy(update={"max_grad_norm": 1e9})
    for share in (12, 4):
        state = TrainState.create(START.copy())
        inner = InnerSteps(Constant(), settings, steps, state)  # pyright: ignore[reportArgumentType]
        moved = inner.train_shard(list(SAMPLES[:share]), 0, 2)
        second = summed(moved, 8)[LAYOUT.size :] / share
        np.testing.assert_allclose(second, 9.0 * (1 - 0.95**4), rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_sent_as_it_is():
    """So the coordinator names the tensor: after the update every weight would be a NaN."""
    inner, _ = worker(plan(inner=4))
    broken = SAMPLES[:16].copy()
    broken[6, 17] = np.nan
    moved = inner.train_shard(list(broken), 0, 4)
    sent = summed(moved, 4)
    assert np.flatnonzero(~np.isfinite(sent)).tolist() == [17]
    assert moved.samples == 16, "it is not a part that is handed in"


@pytest.mark.parametrize(("limit", "taken"), [(None, 16), (9.5, 16), (2.5, 12), (0.0, 4)])
def test_a_worker_stops_after_the_step_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, taken: int
):
    clock: Callable[[], int] = count().__next__  # a second between any two looks
    monkeypatch.setattr(inner_steps, "time", SimpleNamespace(perf_counter=clock))
    inner, _ = worker(plan(inner=4))
    moved = inner.train_shard(list(SAMPLES[:16]), 0, 4, limit=limit)
    assert (moved.samples, moved.result.weight) == (taken, taken)


def test_inner_steps_are_as_even_as_can_be():
    assert [len(piece) for piece in split_into_steps(17, 4)] == [4, 4, 4, 5]
    assert [len(piece) for piece in split_into_steps(1, 4)] == [1]
    assert [len(piece) for piece in split_into_steps(6, 4)] == [3, 3]
    for samples in range(1, 60):
        for size in range(1, 9):
            pieces = split_into_steps(samples, size)
            assert [i for piece in pieces for i in piece] == list(range(samples))
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_a_second_shard_of_a_round_begins_at_the_common_weights():
    inner, state = worker(plan(inner=4))
    replica: Any = inner._replica
    inner.train_shard(list(SAMPLES[:8]), 0, 4)
    seen: list[np.ndarray] = []
    forward = replica.forward_backward

    def noting(*args: Any) -> StepResult:
        seen.append(replica.weights.copy())
        return forward(*args)

    replica.forward_backward = noting
    inner.train_shard(list(SAMPLES[8:12]), 0, 4)
    np.testing.assert_array_equal(seen[0], state.weights)
