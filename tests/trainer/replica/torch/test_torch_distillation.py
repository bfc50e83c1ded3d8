"""The torch replica under a teacher: against transformers and the definition, however it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import gradient, relative, start, taught
from trainer.config.distillation import Divergence
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.replica.microbatch import MicroBatchLimit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny
    from trainer.config.run import RunConfig
    from trainer.replica.torch.replica import TorchReplica

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
VOCABULARY = 300


def distilling(**settings: Any) -> dict[str, Any]:
    return {"task": "causal-lm", "method": "full", "distillation": {"alpha": 0.7}, **settings}


def by_definition(
    folder: Path, config: RunConfig, replica: TorchReplica, batch: list[Encoded]
) -> tuple[float, float, np.ndarray]:
    """Return losses and the gradient by transformers and autograd in fp64, a sample at a time."""
    import transformers

    settings = config.distillation
    assert settings is not None
    alpha, temperature = settings.alpha, settings.temperature
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ce_sum = kl_sum = 0.0
    for sample in batch:
        assert sample.soft is not None
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)
        logits = model(input_ids=ids[None]).logits[0]
        log_q = torch.log_softmax(logits, -1)
        log_qt = torch.log_softmax(logits / temperature, -1)
        loss = logits.new_zeros(())
        for at in np.flatnonzero(sample.labels != IGNORED):
            span = slice(int(sample.soft.offsets[at]), int(sample.soft.offsets[at + 1]))
            named = torch.tensor(sample.soft.ids[span], dtype=torch.int64)
            p = torch.tensor([*sample.soft.weights[span], sample.soft.rest[at]]).double()
            others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, named, False)
            row = log_qt[at - 1]
            log_b = torch.cat([row[named], row[others].logsumexp(0)[None]])
            log_m = torch.logaddexp(p.log(), log_b) - np.log(2)
            kl = {
                "forward": (p * (p.log() - log_b)).sum(),
                "reverse": (log_b.exp() * (log_b - p.log())).sum(),
                "jsd": ((p * (p.log() - log_m)).sum() + (log_b.exp() * (log_b - log_m)).sum()) / 2,
            }[settings.divergence]
            ce = -log_q[at - 1, ids[at]]
            loss = loss + alpha * temperature**2 * kl + (1 - alpha) * ce
            ce_sum, kl_sum = ce_sum + ce.item(), kl_sum + kl.item()
        loss.backward()
    flat = np.zeros(replica.layout.size)
    parameters = dict(model.named_parameters())
    for slot in replica.layout.iter_tensors():
        found = parameters[slot.name].grad
        assert found is not None
        flat[slot.start : slot.stop] = found.numpy().reshape(-1)
    return ce_sum, kl_sum, flat


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("model_type", "tied", "temperature"), [("qwen3", True, 1.0), ("llama", False, 2.0)]
)
def test_loss_and_gradient_are_those_of_the_definition(
    tiny: Tiny, divergence: Divergence, model_type: str, tied: bool, temperature: float
) -> None:
    folder = tiny.model(model_type, tie_word_embeddings=tied)
    settings = {"alpha": 0.7, "temperature": temperature, "divergence": divergence}
    config = tiny.config(folder, **distilling(distillation=settings))
    replica, _ = start(folder, config)
    batch = taught(tiny.batch(5, "causal-lm"), temperature)
    ce, kl, expected = by_definition(folder, config, replica, batch)
    flat, result, order = gradient(replica, batch)
    assert order == list(replica.layout.send_order)
    assert result.ce_sum == pytest.approx(ce, rel=1e-5)
    assert result.kl_sum == pytest.approx(kl, rel=1e-5)
    assert result.loss_sum == pytest.approx(0.7 * temperature**2 * kl + 0.3 * ce, rel=1e-5)
    error = relative(flat, expected)
    print(f"the gradient differs by {error:.2e} of its norm")
    assert error < 1e-5  # the contract is 1e-4


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pack", [False, True])
def test_cutting_and_packing_do_not_matter(tiny: Tiny, method: str, dtype: str, pack: bool) -> None:
    folder = tiny.model(tie_word_embeddings=False)
    settings = {"method": method, "model__dtype": dtype, "data__max_seq_len": 64}
    batch = taught(tiny.batch(8, "causal-lm"))
    exact = tiny.config(folder, **distilling(**{**settings, "model__dtype": "float32"}))
    expected, theirs, _ = gradient(start(folder, exact)[0], batch)
    replica, _ = tiny.start(folder, **distilling(**settings, training__pack=pack))
    within = 1e-6 if dtype == "float32" else 0.05  # bf16 autocast
    for limit in (
        MicroBatchLimit(1, 1000),
        MicroBatchLimit(100, 100),
        MicroBatchLimit(100, 10_000),
    ):
        replica.split.limit = limit
        flat, result, _ = gradient(replica, batch)
        assert relative(flat, expected) < within
        assert result.loss_sum == pytest.approx(theirs.loss_sum, rel=within)
        assert result.kl_sum == pytest.approx(theirs.kl_sum, rel=within)
        assert result.weight == theirs.weight


def test_without_alpha_a_teacher_is_not_heard(tiny: Tiny) -> None:
    """To the bit, by the config and by the call; and what a call says is over with it."""
    plain = tiny.batch(6, "causal-lm")
    batch = taught(plain)
    replica, _ = tiny.start(**distilling())
    flat, result, _ = gradient(replica, plain)
    assert (result.ce_sum, result.kl_sum) == (None, None)
    unheard = replica.forward_backward(batch, lambda *_: None, 0.0)
    assert np.array_equal(replica.gradient.numpy(), flat)
    assert (unheard.loss_sum, unheard.kl_sum) == (result.loss_sum, None)
    deaf, _ = tiny.start(**distilling(distillation={"alpha": 0.0}))
    assert np.array_equal(gradient(deaf, batch)[0], flat)
    heard = replica.accumulate(batch)
    assert heard.ce_sum == pytest.approx(result.loss_sum, rel=1e-6)
    assert heard.loss_sum != pytest.approx(result.loss_sum, rel=1e-2)
    full = replica.accumulate(batch, 1.0)
    assert full.loss_sum == full.kl_sum


def test_evaluation_is_the_cross_entropy(tiny: Tiny) -> None:
    replica, _ = tiny.start(**distilling())
    plain = tiny.batch(6, "causal-lm")
    assert replica.evaluate(taught(plain)) == replica.evaluate(plain)


def test_samples_without_targets(tiny: Tiny) -> None:
    replica, _ = tiny.start(**distilling())
    ids = np.arange(9, dtype=np.int32)
    silent = taught([Encoded(ids, np.full(9, IGNORED, np.int32))])
    flat, result, _ = gradient(replica, silent)
    assert (result.weight, result.loss_sum) == (0, 0.0)
    assert not flat.any()
    lone = taught([Encoded(ids[:1], np.array([IGNORED], np.int32))])
    assert gradient(replica, lone)[1].weight == 0


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cuda_agrees_with_the_cpu(tiny: Tiny, divergence: Divergence, temperature: float) -> None:
    folder = tiny.model()
    settings = {"alpha": 0.7, "temperature": temperature, "divergence": divergence}
    config = tiny.config(folder, **distilling(distillation=settings, training__pack=True))
    batch = taught(tiny.batch(8, "causal-lm"), temperature)
    host, theirs, _ = gradient(start(folder, config)[0], batch)
    card, mine, _ = gradient(start(folder, config, device="cuda:0")[0], batch)
    assert relative(card, host) < 0.05  # bf16 autocast
    assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=0.02)
