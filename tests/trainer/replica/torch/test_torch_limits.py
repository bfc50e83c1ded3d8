"""The torch replica at its limits: NaN, memory, odd models and devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import METHODS, TASKS, gradient, relative, start
from trainer.data.tokens import Encoded
from trainer.model.layout import build_layout
from trainer.planning.replica import CPU_TOKENS
from trainer.replica.torch.replica import TorchReplica
from trainer.system.errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nan_is_passed_on(tiny: Tiny, precision: str) -> None:
    """Whatever the loss scale: the coordinator halts the run and names the tensor (F-DP-003)."""
    replica, weights = tiny.start(training__precision=precision)
    poisoned = weights.copy()
    poisoned[0] = np.nan
    replica.write_trainable(poisoned)
    flat, result, order = gradient(replica, tiny.batch(3))
    assert order == list(replica.layout.send_order)
    assert np.isnan(flat).any()
    assert np.isnan(result.loss_sum)


HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 67108864 bytes. Error code 12 (Cannot allocate memory)"
)
"""What torch 2.9 raised under a small RLIMIT_DATA."""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), HOST, MemoryError()])
def test_running_out_of_memory_halves_and_remembers(
    error: Exception, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that holds three samples, also when it gives in after blocks were sent."""
    from trainer.replica.torch import objective

    replica, _ = tiny.start(training__micro_batch_size="auto")
    batch = tiny.batch(12)
    whole = gradient(replica, batch)[0]
    real = objective.classification_loss

    def crowded(model: Any, micro: Any, autocast: Any, *settings: Any) -> Any:
        if micro.input_ids.shape[0] > 3:
            raise error
        return real(model, micro, autocast, *settings)

    monkeypatch.setattr(objective, "classification_loss", crowded)
    flat, _, order = gradient(replica, batch)
    assert order == list(replica.layout.send_order)
    assert relative(flat, whole) < 1e-6
    assert replica.split.limit.samples == 3

    failures = iter([True])

    def late(index: int, values: np.ndarray) -> None:
        sent.append(index)
        values /= 2  # they are the receiver's
        taken[index] = values, values.copy()
        if index == 1 and next(failures, False):
            raise error

    sent: list[int] = []
    taken: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    replica.forward_backward(batch, late)
    assert sent == list(replica.layout.send_order)
    assert all(np.array_equal(values, then) for values, then in taken.values())
    assert relative(np.concatenate([taken[index][0] for index in sorted(taken)]), whole / 2) < 1e-6
    assert relative(gradient(replica, batch)[0], whole) < 1e-6

    def full(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(objective, "classification_loss", full)
    with pytest.raises(DoesNotFitError, match=r"one sample of \d+ tokens does not fit"):
        replica.forward_backward(batch, lambda *_: None)


def test_automatic_micro_batches_on_the_cpu_are_bounded(tiny: Tiny) -> None:
    replica, _ = tiny.start(training__micro_batch_size="auto")
    assert 64 <= replica.split.limit.tokens <= CPU_TOKENS


def test_a_pad_token_that_also_ends_texts(tiny: Tiny, tmp_path: Path) -> None:
    """The last token is found by length, so a text's own end counts."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.model(), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 7}))
    replica, _ = tiny.start(folder)
    long = Encoded(np.arange(20, 60, dtype=np.int32), 0)
    ended = Encoded(np.array([3, 4, 7], dtype=np.int32), 1)
    alone = replica.evaluate([ended]).loss_sum + replica.evaluate([long]).loss_sum
    assert replica.evaluate([long, ended]).loss_sum == pytest.approx(alone, rel=1e-5)


def test_damaged_weights_are_one_line(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.model(), folder)
    config = tiny.config(folder)
    layout = build_layout(folder, config)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="truncated") as caught:
        TorchReplica(folder, config, layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "must be cpu or cuda:N"),
        ("cuda:x", "must be cpu or cuda:N"),
        ("cuda:99", r"cuda:99: torch sees \d+ CUDA devices"),
    ],
)
def test_devices_that_are_not_there(tiny: Tiny, device: str, message: str) -> None:
    folder = tiny.model()
    config = tiny.config(folder)
    with pytest.raises(InputError, match=message):
        TorchReplica(folder, config, build_layout(folder, config), device)


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(("method", "quantization"), METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_cuda_agrees_with_the_cpu(tiny: Tiny, method: str, quantization: str, task: str) -> None:
    folder = tiny.model()
    config = tiny.config(folder, task=task, method=method, model__quantization=quantization)
    batch = tiny.batch(8, task)
    host = gradient(start(folder, config)[0], batch)
    card = gradient(start(folder, config, device="cuda:0")[0], batch)
    assert card[2] == host[2]
    assert relative(card[0], host[0]) < 0.05  # bf16 autocast
    assert card[1].loss_sum == pytest.approx(host[1].loss_sum, rel=0.02)
