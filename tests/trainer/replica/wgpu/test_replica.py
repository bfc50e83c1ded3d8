"""The wgpu replica against the torch one on the CPU: loss, every gradient, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.families import COMPUTED_HERE
from tests.trainer.replica.driving import METHODS, TASKS, gradient, relative
from tests.trainer.replica.test_shares import DORA, OF_CLASSES, SETTINGS
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.wgpu.gpu.device import Device
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny


def worst(layout: Any, mine: np.ndarray, theirs: np.ndarray) -> str:
    """Name the tensor that differs most."""
    errors = {
        slot.name: relative(mine[slot.start : slot.stop], theirs[slot.start : slot.stop])
        for slot in layout.iter_tensors()
        if theirs[slot.start : slot.stop].any()
    }
    name = max(errors, key=lambda name: errors[name])
    return f"{name}: {errors[name]:.1e}"


@pytest.mark.parametrize("model_type", COMPUTED_HERE)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("method", "quantization"), METHODS)
def test_loss_and_gradients_are_those_of_torch(
    device: Device, tiny: Tiny, model_type: str, task: str, method: str, quantization: str
) -> None:
    folder = tiny.model(model_type, tie_word_embeddings=task == "classify")
    settings = {"task": task, "method": method, "model__quantization": quantization}
    torch_replica, _ = tiny.start(folder, **settings)
    replica, _ = tiny.wgpu(device, folder, **settings)
    batch = tiny.batch(7, task)
    theirs, expected, order = gradient(torch_replica, batch)
    mine, result, my_order = gradient(replica, batch)
    assert my_order == order
    assert (result.weight, result.tokens) == (expected.weight, expected.tokens)
    tolerance = 1e-4 if quantization == "nf4" else 1e-5
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=tolerance)
    assert relative(mine, theirs) < tolerance, worst(replica.layout, mine, theirs)

    scored, scored_by_torch = replica.evaluate(batch), torch_replica.evaluate(batch)
    assert scored.weight == scored_by_torch.weight
    assert scored.loss_sum == pytest.approx(scored_by_torch.loss_sum, rel=tolerance)
    assert scored.confusion == scored_by_torch.confusion
    assert np.array_equal(gradient(replica, batch)[0], mine)  # bit for bit, evaluation between


@pytest.mark.parametrize(
    ("task", "chosen"),
    [
        *(("causal-lm", chosen) for chosen in SETTINGS.values()),
        ("classify", OF_CLASSES["weights"]),
    ],
)
def test_gradients_under_each_setting_are_those_of_torch(
    device: Device, tiny: Tiny, task: str, chosen: dict[str, Any]
) -> None:
    folder, settings = tiny.model(), {"task": task, **chosen}
    batch = tiny.batch(7, task)
    theirs, expected, _ = gradient(tiny.start(folder, **settings)[0], batch)
    mine, result, _ = gradient(tiny.wgpu(device, folder, **settings)[0], batch)
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert relative(mine, theirs) < 1e-5


@pytest.mark.parametrize(
    "chosen",
    [OF_CLASSES["smoothing"], DORA, {"lora__modules_to_save": ["embed_tokens"]}, {"task": "dpo"}],
)
def test_what_wgpu_does_not_compute_is_refused(
    device: Device, tiny: Tiny, chosen: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"(label_smoothing|use_dora|modules_to_save|dpo): wgpu"):
        tiny.wgpu(device, **chosen)


@pytest.mark.parametrize("task", TASKS)
def test_the_split_into_micro_batches_does_not_matter(
    device: Device, tiny: Tiny, task: str
) -> None:
    replica, _ = tiny.wgpu(device, task=task)
    batch = tiny.batch(8, task)
    found: list[np.ndarray] = []
    confusions: list[Any] = []
    for limit in (MicroBatchLimit(1, 1000), MicroBatchLimit(8, 1000), MicroBatchLimit(100, 100)):
        replica.limit = limit
        found.append(gradient(replica, batch)[0])
        confusions.append(replica.evaluate(batch).confusion)
    assert max(relative(flat, found[0]) for flat in found) < 1e-6
    assert confusions == confusions[:1] * 3


@pytest.mark.parametrize("method", ["lora", "full"])
def test_recomputing_activations_gives_the_same_bits(
    device: Device, tiny: Tiny, method: str
) -> None:
    batch, found = tiny.batch(6), list[np.ndarray]()
    for word in ("off", "on"):
        replica, _ = tiny.wgpu(device, method=method, training__gradient_checkpointing=word)
        found.append(gradient(replica, batch)[0])
    assert np.array_equal(found[0], found[1])


def test_a_step_crosses_the_bus_once_each_way(device: Device, tiny: Tiny) -> None:
    """Weights and gradients apart, which are exchanged with the other workers."""
    replica, _ = tiny.wgpu(device)
    batch = tiny.batch(10)
    gradient(replica, batch)
    before = device.counters.uploads, device.counters.readbacks
    gradient(replica, batch)
    assert (device.counters.uploads - before[0], device.counters.readbacks - before[1]) == (1, 1)


def test_packing_is_torchs_own_affair(device: Device, tiny: Tiny) -> None:
    """The engine pads each sample instead; members of one run may differ, results do not."""
    batch = tiny.batch(7, "causal-lm")
    packed, padded = ({"task": "causal-lm", "training__pack": pack} for pack in (True, False))
    theirs, expected, _ = gradient(tiny.start(**packed)[0], batch)
    mine, result, _ = gradient(tiny.wgpu(device, **packed)[0], batch)
    assert np.array_equal(mine, gradient(tiny.wgpu(device, **padded)[0], batch)[0])
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("task", TASKS)
def test_an_empty_shard_is_zeros(device: Device, tiny: Tiny, task: str) -> None:
    replica, _ = tiny.wgpu(device, task=task)
    gradient(replica, tiny.batch(2, task))  # leaves something to clear
    flat, result, order = gradient(replica, [])
    assert not flat.any()
    assert order == list(replica.layout.send_order)
    assert (result.loss_sum, result.weight, result.tokens) == (0.0, 0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_passed_on(device: Device, tiny: Tiny, value: float) -> None:
    """F-DP-003 needs to see it, though `max` on a device may drop a NaN."""
    replica, weights = tiny.wgpu(device)
    batch = tiny.batch(3)
    fine = gradient(replica, batch)[1].loss_sum
    spoilt = weights.copy()
    spoilt[17] = value
    replica.write_trainable(spoilt)
    assert np.isnan(gradient(replica, batch)[1].loss_sum)
    replica.write_trainable(weights)
    assert gradient(replica, batch)[1].loss_sum == fine


def test_an_exception_while_blocks_come_in_leaves_the_replica_usable(
    device: Device, tiny: Tiny
) -> None:
    replica, _ = tiny.wgpu(device)
    batch = tiny.batch(4)
    expected = gradient(replica, batch)[0]

    def broken(index: int, gradient: np.ndarray) -> None:
        raise ConnectionError(index)

    with pytest.raises(ConnectionError):
        replica.forward_backward(batch, broken)
    flat, result, _ = gradient(replica, batch)
    assert np.array_equal(flat, expected)
    assert result.loss_sum == pytest.approx(replica.evaluate(batch).loss_sum, rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_arrays_beyond_a_kernels_argument_are_bound_in_windows(
    device: Device, tiny: Tiny, task: str, method: str
) -> None:
    """As an embedding of 600 MB is on a device that allows 128 MiB; here 75 KiB of 32."""
    narrow = Device(device.adapter, binding_limit=32 << 10)
    batch, settings = tiny.batch(5, task), {"task": task, "method": method}
    found = [
        gradient(tiny.wgpu(where, **settings, data__max_seq_len=48)[0], batch)
        for where in (device, narrow)
    ]
    assert relative(found[1][0], found[0][0]) < 1e-6
    assert found[1][1].loss_sum == pytest.approx(found[0][1].loss_sum, rel=1e-6)
