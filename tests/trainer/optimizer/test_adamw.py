import gc
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from trainer.config.optimizer import OptimizerConfig
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import CHUNK, AdamW, TrainState, compute_power, weights_digest


def make_layout(*shapes: tuple[int, ...]) -> GradientLayout:
    slots: list[TensorSlot] = []
    start = 0
    for index, shape in enumerate(shapes):
        slots.append(TensorSlot(f"tensor{index}", shape, start))
        start = slots[-1].stop
    return GradientLayout((Block(0, "layers.0", 0, start, tuple(slots)),), num_layers=1)


SHAPES = ((300, 250), (33,), (8, 4, 2), (1,), (70, 1000))


def draw(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_follows_torch_adamw(weight_decay: float, scale: float):
    layout = make_layout(*SHAPES)
    settings = OptimizerConfig(weight_decay=weight_decay, beta1=0.8, beta2=0.95, epsilon=1e-6)
    optimizer = AdamW(settings, layout)
    state = TrainState.create(draw(layout.size))

    parameters = [
        torch.nn.Parameter(torch.from_numpy(state.weights[slot.start : slot.stop].copy()))
        for slot in layout.iter_tensors()
    ]
    groups = [
        {"params": [parameter], "weight_decay": weight_decay if len(slot.shape) >= 2 else 0.0}
        for slot, parameter in zip(layout.iter_tensors(), parameters, strict=True)
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, lr=0.1, foreach=False)
    for step in range(20):
        gradient = draw(layout.size, seed=step + 1)
        learning_rate = 0.01 / (step + 1)
        optimizer.apply(state, gradient, learning_rate, scale)
        for group in reference.param_groups:
            group["lr"] = learning_rate
        for slot, parameter in zip(layout.iter_tensors(), parameters, strict=True):
            parameter.grad = torch.from_numpy(gradient[slot.start : slot.stop]) * scale
        reference.step()
    expected = torch.cat([parameter.detach() for parameter in parameters]).numpy()
    np.testing.assert_allclose(state.weights, expected, rtol=1e-6, atol=1e-6)
    assert state.step == 20


def test_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch):
    layout = make_layout(*SHAPES)
    assert layout.size > CHUNK, "the test needs more than one chunk"

    def run() -> str:
        optimizer = AdamW(OptimizerConfig(weight_decay=0.1), layout)
        state = TrainState.create(draw(layout.size))
        for step in range(3):
            optimizer.apply(state, draw(layout.size, step), 1e-2, 0.5)
        return state.compute_digest()

    whole = run()
    monkeypatch.setattr("trainer.optimizer.adamw.CHUNK", 1000)
    assert run() == whole


def test_the_gradient_is_left_alone():
    layout = make_layout((10, 10))
    gradient = draw(100)
    before = gradient.copy()
    AdamW(OptimizerConfig(), layout).apply(TrainState.create(draw(100)), gradient, 0.1, 0.5)
    np.testing.assert_array_equal(gradient, before)


def test_only_matrices_decay():
    layout = make_layout((4, 4), (4,), (2, 2, 2))
    state = TrainState.create(np.ones(layout.size, dtype=np.float32))
    optimizer = AdamW(OptimizerConfig(weight_decay=0.5), layout)
    optimizer.apply(state, np.zeros(layout.size, dtype=np.float32), 0.1, 1.0)
    np.testing.assert_array_equal(state.weights[:16], np.float32(0.95))
    np.testing.assert_array_equal(state.weights[16:20], np.float32(1.0))
    np.testing.assert_array_equal(state.weights[20:], np.float32(0.95))


def test_a_snapshot_never_changes():
    layout = make_layout((100, 100), (7,))
    optimizer = AdamW(OptimizerConfig(), layout)
    state = TrainState.create(draw(layout.size))
    optimizer.apply(state, draw(layout.size, 1), 1e-2, 1.0)
    snapshot = state.take_snapshot()
    frozen = [snapshot.weights.copy(), snapshot.first_moment.copy(), snapshot.second_moment.copy()]
    second = None
    for step in range(3):
        optimizer.apply(state, draw(layout.size, step), 1e-2, 1.0)
        second = second or state.take_snapshot()
    assert snapshot.step == 1
    assert second is not None
    assert second.step == 2
    assert state.step == 4
    np.testing.assert_array_equal(snapshot.weights, frozen[0])
    np.testing.assert_array_equal(snapshot.first_moment, frozen[1])
    np.testing.assert_array_equal(snapshot.second_moment, frozen[2])
    assert not np.array_equal(state.weights, frozen[0])
    with pytest.raises(ValueError, match="read-only"):
        snapshot.weights[0] = 1.0


def test_copies_only_while_a_snapshot_lives():
    layout = make_layout((100, 100))
    optimizer = AdamW(OptimizerConfig(), layout)
    state = TrainState.create(draw(layout.size))
    gradient = draw(layout.size, 1)

    arrays = state.weights
    optimizer.apply(state, gradient, 1e-2, 1.0)
    assert state.weights is arrays, "nobody reads: in place"

    snapshot = state.take_snapshot()
    assert np.shares_memory(snapshot.weights, state.weights), "a snapshot copies nothing"
    optimizer.apply(state, gradient, 1e-2, 1.0)
    assert not np.shares_memory(snapshot.weights, state.weights)
    arrays = state.weights
    optimizer.apply(state, gradient, 1e-2, 1.0)
    assert state.weights is arrays, "one copy for one snapshot, not one a step"

    dropped = state.take_snapshot()
    del dropped
    gc.collect()
    optimizer.apply(state, gradient, 1e-2, 1.0)
    assert state.weights is arrays

    state.take_snapshot().close()
    closed = state.take_snapshot()
    closed.close()
    assert closed.is_closed
    optimizer.apply(state, gradient, 1e-2, 1.0)
    assert state.weights is arrays
    with pytest.raises(AssertionError, match="closed"):
        _ = closed.weights


def test_only_vectors_that_are_still_to_be_read_are_copied():
    layout = make_layout((100, 100))
    optimizer = AdamW(OptimizerConfig(), layout)
    state = TrainState.create(draw(layout.size))
    optimizer.apply(state, draw(layout.size, 1), 1e-2, 1.0)
    weights, first, second = state.weights, state.first_moment, state.second_moment
    snapshot, other = state.take_snapshot(), state.take_snapshot()
    expected = second.copy()
    for reader in (snapshot, other):
        assert len(list(reader.iter_chunks("weights"))) == 1
    pieces = snapshot.iter_chunks("first_moment")
    held = next(pieces)
    before = held.copy()
    other.close()

    optimizer.apply(state, draw(layout.size, 2), 1e-2, 1.0)

    assert state.weights is weights, "it was read"
    assert state.first_moment is not first, "it is being read"
    assert state.second_moment is not second, "it comes next"
    np.testing.assert_array_equal(held, before)
    assert next(pieces, None) is None
    np.testing.assert_array_equal(next(snapshot.iter_chunks("second_moment")), expected)
    with pytest.raises(AssertionError, match="weights released"):
        _ = snapshot.weights


def test_an_update_allocates_nothing_but_the_copy_of_a_live_snapshot():
    layout = make_layout((1000, 1000))
    optimizer = AdamW(OptimizerConfig(), layout)
    state = TrainState.create(draw(layout.size))
    gradient = draw(layout.size, 1)
    tracemalloc.start()
    try:
        optimizer.apply(state, gradient, 1e-2, 1.0)
        plain = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        snapshot = state.take_snapshot()
        optimizer.apply(state, gradient, 1e-2, 1.0)
        copied = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del snapshot
    assert plain < 0.1 * gradient.nbytes
    assert copied < 3.1 * gradient.nbytes


def test_a_reader_in_another_thread_sees_one_step():
    layout = make_layout((200, 200))
    optimizer = AdamW(OptimizerConfig(), layout)
    state = TrainState.create(draw(layout.size))
    started, torn = threading.Event(), []

    def read(snapshot, expected: str) -> None:
        started.set()
        torn.extend(1 for _ in range(20) if weights_digest(snapshot.weights) != expected)

    reader = threading.Thread(
        target=read, args=(state.take_snapshot(), weights_digest(state.weights)), daemon=True
    )
    reader.start()
    assert started.wait(10)
    for step in range(20):
        optimizer.apply(state, draw(layout.size, step), 1e-2, 1.0)
    reader.join(30)
    assert not torn


def test_digests():
    zeros, ones = np.zeros(3, dtype=np.float32), np.ones(3, dtype=np.float32)
    assert weights_digest(zeros) == weights_digest(zeros.astype(">f4"))
    assert weights_digest(zeros) != weights_digest(ones)
    assert weights_digest(zeros) != weights_digest(-zeros), "signed zeros are different bits"
    state = TrainState.create(ones.copy())
    digest = state.compute_digest()
    state.step += 1
    assert state.compute_digest() != digest


@pytest.mark.parametrize("base", [0.9, 0.999, 0.0])
def test_power_agrees_with_libm(base: float):
    for exponent in (1, 2, 3, 100, 12_345):
        assert compute_power(base, exponent) == pytest.approx(base**exponent, rel=1e-12)
