"""The torch replica against plain transformers, and against itself under another split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import METHODS, TASKS, gradient, relative
from trainer.data.tokens import Encoded
from trainer.replica.base import StepResult
from trainer.replica.microbatch import MicroBatchLimit
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("task", TASKS)
def test_full_gradients_are_those_of_transformers(tiny: Tiny, model_type: str, task: str) -> None:
    """Against the model's own loss, one sample at a time, without padding."""
    import transformers

    folder = tiny.model(model_type, "classify" if task == "classify" else "causal-lm")
    replica, weights = tiny.start(folder, task=task, method="full")
    batch = tiny.batch(6, task)
    mine, result, order = gradient(replica, batch)
    assert order == list(replica.layout.send_order)
    assert result.tokens == sum(len(sample.input_ids) for sample in batch)

    auto = {
        "classify": transformers.AutoModelForSequenceClassification,
        "causal-lm": transformers.AutoModelForCausalLM,
    }[task]
    model = auto.from_pretrained(folder)
    loss_sum, weight = 0.0, 0
    for sample in batch:
        labels = torch.tensor(sample.labels, dtype=torch.int64).unsqueeze(0)
        count = 1 if task == "classify" else int((labels[:, 1:] != -100).sum())
        ids = torch.tensor(sample.input_ids, dtype=torch.int64).unsqueeze(0)
        loss = model(input_ids=ids, labels=labels).loss * count
        loss.backward()
        loss_sum += float(loss.detach())
        weight += count
    theirs = np.zeros_like(weights)
    parameters = dict(model.named_parameters())
    for slot in replica.layout.iter_tensors():
        theirs[slot.start : slot.stop] = parameters[slot.name].grad.numpy().reshape(-1)
        assert mine[slot.start : slot.stop].any(), slot.name
    assert result.weight == weight
    assert result.loss_sum == pytest.approx(loss_sum, rel=1e-5)
    assert relative(mine, theirs) < 2e-6


@pytest.mark.parametrize(("method", "quantization"), METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_the_split_into_micro_batches_does_not_matter(
    tiny: Tiny, method: str, quantization: str, task: str
) -> None:
    folder = tiny.model(tie_word_embeddings=False)
    batch = tiny.batch(8, task)
    replica, _ = tiny.start(folder, task=task, method=method, model__quantization=quantization)
    found: list[tuple[np.ndarray, StepResult]] = []
    for limit in (MicroBatchLimit(1, 1000), MicroBatchLimit(8, 1000), MicroBatchLimit(100, 100)):
        replica.split.limit = limit
        flat, result, order = gradient(replica, batch)
        assert order == list(replica.layout.send_order)
        assert np.isfinite(flat).all()
        found.append((flat, result))
    for flat, result in found[1:]:
        assert relative(flat, found[0][0]) < 1e-6
        assert result.weight == found[0][1].weight
        assert result.loss_sum == pytest.approx(found[0][1].loss_sum, rel=1e-6)


@pytest.mark.parametrize(("method", "quantization"), METHODS)
def test_recomputing_activations_and_repeating_give_the_same(
    tiny: Tiny, method: str, quantization: str
) -> None:
    settings = {"method": method, "model__quantization": quantization}
    plain, recomputing = (
        tiny.start(**settings, training__gradient_checkpointing=word)[0] for word in ("off", "on")
    )
    batch = tiny.batch(6)
    first = gradient(plain, batch)[0]
    assert np.array_equal(first, gradient(plain, batch)[0])
    assert relative(gradient(recomputing, batch)[0], first) < 1e-6


@pytest.mark.parametrize(("method", "quantization"), METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_evaluation_leaves_gradients_alone(
    tiny: Tiny, method: str, quantization: str, task: str
) -> None:
    """On AVX512-BF16 CPUs an eval-mode forward of bitsandbytes spoils every later gradient."""
    replica, _ = tiny.start(task=task, method=method, model__quantization=quantization)
    batch = tiny.batch(7, task)
    before, result, _ = gradient(replica, batch)
    scored = replica.evaluate(batch)
    after = gradient(replica, batch)[0]
    assert np.array_equal(before, after)
    assert scored.weight == result.weight
    assert scored.loss_sum == pytest.approx(result.loss_sum, rel=1e-5)
    if task == "causal-lm":
        assert scored.confusion is None
    else:
        assert scored.confusion is not None
        labels = [sum(row) for row in scored.confusion]
        assert labels == [2, 2, 1, 1, 1]


def test_nf4_survives_even_eval_mode(tiny: Tiny) -> None:
    """Two guards against the repacking: we stay in train mode, and the repacking is off."""
    replica, _ = tiny.start(model__quantization="nf4")
    batch = tiny.batch(6)
    before = gradient(replica, batch)[0]
    assert all(module.training for module in replica._model.modules())
    replica._model.eval()
    replica.evaluate(batch)
    replica._model.train()
    assert np.array_equal(gradient(replica, batch)[0], before)


def test_nf4_gradients_are_near_those_of_the_unquantised_base(tiny: Tiny) -> None:
    """A rough net: the AVX512-BF16 defect moves gradients by 93 % in the median."""
    batch = tiny.batch(8)
    found = [
        gradient(tiny.start(model__quantization=kind)[0], batch)[0] for kind in ("none", "nf4")
    ]
    assert relative(found[1], found[0]) < 0.35


def test_nf4_of_a_width_that_bitsandbytes_misreads_is_refused(tiny: Tiny) -> None:
    folder = tiny.model(intermediate_size=96)
    with pytest.raises(InputError, match=r"down_proj is 96 wide; nf4 on the CPU needs a multiple"):
        tiny.start(folder, model__quantization="nf4")


def test_weights_written_are_weights_used(tiny: Tiny) -> None:
    """The gradient equals the slope of the loss along a direction."""
    replica, weights = tiny.start(task="causal-lm", method="full")
    batch = tiny.batch(4, "causal-lm")
    flat = gradient(replica, batch)[0].astype(np.float64)
    direction = flat / np.linalg.norm(flat)
    losses: list[float] = []
    for step in (1e-3, -1e-3):
        replica.write_trainable((weights + step * direction).astype(np.float32))
        losses.append(replica.evaluate(batch).loss_sum)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float(flat @ direction), rel=1e-2)


def test_weights_written_are_used_where_they_are(tiny: Tiny) -> None:
    """A process that trains alone has them once; nobody writes to those that may only be read."""
    replica, weights = tiny.start(task="causal-lm", method="full")
    batch = tiny.batch(4, "causal-lm")
    assert replica.weights.data_ptr() == weights.ctypes.data
    before = replica.evaluate(batch).loss_sum
    weights *= 0.5
    replica.write_trainable(weights)
    after = replica.evaluate(batch).loss_sum
    assert after != before
    moved = weights.copy()
    replica.write_trainable(moved)
    weights[:] = np.nan
    assert replica.evaluate(batch).loss_sum == after
    fixed = moved * 2
    fixed.flags.writeable = False
    replica.write_trainable(fixed)
    assert replica.evaluate(batch).loss_sum == before
    assert replica.weights.data_ptr() == moved.ctypes.data


def test_bfloat16_base_keeps_fp32_trainables(tiny: Tiny) -> None:
    batch = tiny.batch(6)
    exact = gradient(tiny.start()[0], batch)[0]
    rounded = gradient(tiny.start(model__dtype="bfloat16")[0], batch)[0]
    assert 0 < relative(rounded, exact) < 0.05


@pytest.mark.parametrize("task", TASKS)
def test_gradients_may_stay_for_an_update_in_place(tiny: Tiny, task: str) -> None:
    """As the blocks say, again after them, and the model reads what is written into `weights`."""
    replica, weights = tiny.start(task=task, method="full")
    batch = tiny.batch(8, task)
    for _ in range(2):
        mine = replica.accumulate(batch)
        flat, theirs, _ = gradient(replica, batch)
        assert np.array_equal(replica.gradient.numpy(), flat)
        assert (mine.loss_sum, mine.weight, mine.tokens) == (
            theirs.loss_sum,
            theirs.weight,
            theirs.tokens,
        )
    assert np.array_equal(replica.weights.numpy(), weights)
    replica.accumulate(batch)
    replica.weights.sub_(replica.gradient, alpha=1e-4)
    assert replica.evaluate(batch).loss_sum < theirs.loss_sum


@pytest.mark.parametrize("task", TASKS)
def test_an_empty_shard_is_zeros(tiny: Tiny, task: str) -> None:
    replica, _ = tiny.start(task=task)
    gradient(replica, tiny.batch(2, task))  # leaves something to clear
    flat, result, order = gradient(replica, [])
    assert order == list(replica.layout.send_order)
    assert not flat.any()
    assert (result.loss_sum, result.weight, result.tokens) == (0.0, 0, 0)
    assert replica.evaluate([]).weight == 0


def test_samples_without_targets_and_above_every_limit(tiny: Tiny) -> None:
    replica, _ = tiny.start(task="causal-lm", training__micro_batch_size="auto")
    replica.split.limit = MicroBatchLimit(8, 16)
    ids = np.arange(50, dtype=np.int32)
    silent = Encoded(ids, np.full(50, -100, dtype=np.int32))
    flat, result, _ = gradient(replica, [silent])
    assert result.weight == 0
    assert not flat.any()
    labels = ids.copy()
    labels[0] = -100
    _, result, _ = gradient(replica, [silent, Encoded(ids, labels)])
    assert result.weight == 49


def test_blocks_leave_while_backward_runs_and_their_errors_surface(tiny: Tiny) -> None:
    replica, _ = tiny.start(method="full")
    batch = tiny.batch(6)
    whole = gradient(replica, batch)[0]

    class LostError(Exception):
        pass

    seen: list[int] = []

    def refuse(index: int, values: np.ndarray) -> None:
        # The lower layer's gradient is not final yet: backward has not reached it.
        lower = replica.layout.blocks[0]
        so_far = replica.gradient[lower.start : lower.stop].numpy()
        assert not np.array_equal(so_far, whole[lower.start : lower.stop])
        seen.append(index)
        raise LostError

    with pytest.raises(LostError):
        replica.forward_backward(batch, refuse)
    assert seen == [1]
    assert np.array_equal(gradient(replica, batch)[0], whole)
