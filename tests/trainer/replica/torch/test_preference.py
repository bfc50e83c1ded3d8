"""DPO (arXiv:2305.18290) against its formula, computed with transformers and PEFT alone."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.real.peft_loop import PeftLoop
from tests.trainer.replica.driving import drawn_weights, gradient, relative
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.replica.torch.replica import TorchReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.trainer.tiny import Tiny
    from trainer.data.tokens import Encoded

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
DPO: dict[str, Any] = {"task": "dpo", "lora__lora_rank": 4}


def log_likelihood(model: Any, row: Encoded) -> torch.Tensor:
    """Return log p of the answer after the prompt, a token after the other."""
    ids, labels = (torch.tensor(part)[None].long() for part in (row.input_ids, row.labels))
    found = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = found.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return (chosen * (wanted >= 0)).sum()


def by_the_paper(
    loop: PeftLoop, batch: list[Encoded], beta: float, adapter: str | None = None
) -> dict[str, float]:
    """Add the gradient of equation 7, summed over pairs; return the loss and the rewards.

    Args:
        adapter: the one of the reference; None: it has none.
    """
    found: dict[str, float] = {"loss": 0, "chosen": 0, "rejected": 0, "right": 0}
    for pair in batch:
        with torch.no_grad(), _reference(loop.model, adapter):
            reference = [log_likelihood(loop.model, row) for row in pair.answers]
        policy = [log_likelihood(loop.model, row) for row in pair.answers]
        good, bad = (beta * (mine - base) for mine, base in zip(policy, reference, strict=True))
        loss = -torch.log(1 / (1 + torch.exp(bad - good)))
        loss.backward()
        for name, value in (("loss", loss), ("chosen", good), ("rejected", bad)):
            found[name] += value.item()
        found["right"] += float(good > bad)
    return found


@contextmanager
def _reference(model: Any, adapter: str | None) -> Iterator[None]:
    if adapter is None:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(adapter)
    yield
    model.set_adapter("default")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"lora__use_rslora": True, "training__gradient_checkpointing": True}),
        ("qwen3", {"training__micro_batch_size": 1, "dpo__beta": 2.0}),
        ("gemma2", {"training__micro_batch_size": "auto"}),
    ],
)
def test_loss_gradient_and_rewards_are_those_of_the_paper(
    tiny: Tiny, model_type: str, settings: dict[str, Any]
) -> None:
    """Gemma 2's logits have a cap, and transformers computes its layers."""
    folder = tiny.model(model_type)
    config = tiny.config(folder, **DPO, **settings)
    batch = tiny.batch(5, "dpo")
    loop = PeftLoop(folder, config)
    loop.write(drawn_weights(folder, config))
    expected = by_the_paper(loop, batch, config.dpo.beta)

    replica, _ = tiny.start(folder, **DPO, **settings)
    before = replica.evaluate(batch)
    mine, result, _ = gradient(replica, batch)
    assert (result.loss_sum, result.weight) == (pytest.approx(expected["loss"], rel=1e-5), 5)
    assert result.tokens == sum(len(row.input_ids) for pair in batch for row in pair.answers)
    assert relative(mine, loop.gradient()) < 1e-5
    assert (before.loss_sum, before.weight) == (pytest.approx(result.loss_sum, rel=1e-6), 5)
    rewards = [expected[name] for name in ("chosen", "rejected", "right")]
    chosen, rejected, margin, right = before.figures.values()
    # Differences of sums of about -60, which float32 knows to 4e-6.
    near = pytest.approx(rewards, rel=1e-5, abs=4e-5 * config.dpo.beta)
    assert [chosen, rejected, right] == near
    assert margin == chosen - rejected
    assert before.compute_scores() == {
        "loss": before.loss_sum / 5,
        "reward_chosen": chosen / 5,
        "reward_rejected": rejected / 5,
        "reward_margin": pytest.approx((chosen - rejected) / 5),
        "reward_accuracy": right / 5,
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_the_reference_may_have_an_adapter(tiny: Tiny, recompute: bool) -> None:
    """Two adapters of PEFT on one base, of which one stays, as TRL has it."""
    folder = tiny.model()
    config = tiny.config(folder, **DPO, training__gradient_checkpointing=recompute)
    layout, batch = build_layout(folder, config), tiny.batch(5, "dpo")
    kept = drawn_weights(folder, config)
    weights = kept + np.random.default_rng(3).normal(0, 0.02, layout.size).astype(np.float32)
    loop = PeftLoop(folder, config)
    loop.model.add_adapter("reference", loop.model.peft_config["default"])
    loop.write(kept)
    own = loop.model.state_dict()
    copied = {name: own[name.replace(".reference.", ".default.")].clone() for name in own}
    loop.model.load_state_dict(copied)
    loop.write(weights)
    expected = by_the_paper(loop, batch, config.dpo.beta, "reference")

    replica = TorchReplica(folder, config, layout, threads=1, reference=kept)
    replica.write_trainable(weights)
    mine, result, _ = gradient(replica, batch)
    found = replica.evaluate(batch)
    assert np.array_equal(replica.weights.numpy(), weights), "its own again, to the last bit"
    assert result.loss_sum == pytest.approx(expected["loss"], rel=1e-6)
    assert relative(mine, loop.gradient()) < 1e-5
    rewards = [expected[name] for name in ("chosen", "rejected", "right")]
    chosen, rejected, _, right = found.figures.values()
    assert [chosen, rejected, right] == pytest.approx(rewards, rel=1e-5, abs=1e-6)

    replica.write_trainable(kept)  # where the training begins
    assert replica.evaluate(batch).loss_sum == pytest.approx(5 * math.log(2), rel=1e-15)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_new_adapter_is_the_reference(tiny: Tiny, quantization: str) -> None:
    """Also in bfloat16: every loss is log 2, to the last bit, and the adapter counts again."""
    folder = tiny.model()
    settings = {**DPO, "model__dtype": "bfloat16", "model__quantization": quantization}
    config = tiny.config(folder, **settings)
    layout = build_layout(folder, config)
    replica = TorchReplica(folder, config, layout, threads=1)
    replica.write_trainable(initial_weights(layout, folder, config))
    batch = tiny.batch(4, "dpo")
    found = replica.evaluate(batch)
    assert found.loss_sum == pytest.approx(4 * math.log(2), rel=1e-15)
    assert [*found.figures.values()] == [0, 0, 0, 0]
    moved, _, _ = gradient(replica, batch)
    assert np.linalg.norm(moved) > 0


def test_an_answer_that_was_cut_away_teaches_nothing(tiny: Tiny) -> None:
    replica, _ = tiny.start(**DPO)
    (pair,) = tiny.batch(1, "dpo")
    for row in pair.answers:
        row.labels[:] = -100  # type: ignore[index]  # an array
    found, result, _ = gradient(replica, [pair])
    assert (result.loss_sum, result.weight) == (pytest.approx(math.log(2)), 1)
    assert not found.any()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "full"}, "task dpo needs method lora"),
        ({"lora__modules_to_save": ["lm_head"]}, "task dpo does not support lora.modules_to_save"),
        ({"training__pack": True}, "training.pack needs task causal-lm"),
        ({"num_classes": 3}, "num_classes and class_names are only allowed when task is classify"),
        (
            {"training__label_smoothing": 0.1},
            "training.label_smoothing 0.1: used only with task cl",
        ),
        ({"distillation.alpha": 0.5}, "distillation needs task causal-lm"),
        ({"parallel__tensor": 2}, "task dpo needs a whole model in each worker"),
        ({"exchange__topology": "ring"}, "task dpo needs a whole model in each worker"),
    ],
)
def test_what_it_does_not_know_is_refused(
    tiny: Tiny, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        tiny.config(**{"task": "dpo"} | settings)


def test_ranks_of_distributed_refuse_it(tiny: Tiny) -> None:
    from trainer.replica.torch.parallel.replica import ParallelReplica

    folder: Path = tiny.model()
    config = tiny.config(folder, **DPO)
    mesh: Any = None  # it is refused before a mesh is looked at
    with pytest.raises(InputError, match="task dpo: processes that share a model"):
        ParallelReplica(folder, config, build_layout(folder, config), mesh, torch.device("cpu"))


def test_members_agree_on_beta(tiny: Tiny) -> None:
    plain, other = (tiny.config(**DPO, dpo__beta=beta).agreement_digest() for beta in (0.1, 0.2))
    assert plain != other
