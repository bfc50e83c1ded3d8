"""What would show the distillation loss wrong: its sign, limits, gradient and estimates."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.tiny_logits import score
from trainer.config.distillation import Divergence
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.distill.logits.scores import Scheme
from trainer.distill.logits.targets import make_targets
from trainer.replica.torch import kd_loss
from trainer.replica.torch.batch import SoftTargetRows, soft_rows
from trainer.replica.torch.kd_loss import KDWeights, row_losses, token_losses

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
VOCABULARY, KEPT = 50, 8


def draw(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def teach(
    logits: Tensor, kept: int, temperature: float = 1.0, dtype: torch.dtype = torch.float64
) -> SoftTargetRows:
    """Return the most likely tokens of `logits` `[N, V]`, and the rest as one; all have no rest."""
    rows, vocabulary = logits.shape
    log_p = torch.log_softmax(logits / temperature, -1)
    _, order = torch.topk(log_p, vocabulary)
    ids, others = order[:, :kept], order[:, kept:]
    log_kept = log_p.gather(1, ids)
    rest = log_p.gather(1, others).exp().sum(1)
    entropy = -(log_kept.exp() * log_kept).sum(1) - torch.xlogy(rest, rest)
    return SoftTargetRows(
        np.arange(rows + 1, dtype=np.int64) * kept,
        ids.reshape(-1).int(),
        log_kept.exp().reshape(-1).to(dtype),
        rest.to(dtype),
        entropy.to(dtype),
    )


def plainly(
    logits: Tensor, wanted: Tensor, soft: SoftTargetRows, mix: KDWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, cross-entropy and divergence by their definitions, over all buckets at once."""
    rows, vocabulary = logits.shape
    ids = soft.ids.view(rows, -1).long()
    q = torch.softmax(logits / mix.temperature, -1)
    others = torch.ones(rows, vocabulary, dtype=q.dtype).scatter(1, ids, 0)
    p = torch.cat([soft.weights.view(rows, -1), soft.rest[:, None]], 1).to(q.dtype)
    q = torch.cat([q.gather(1, ids), (q * others).sum(1, keepdim=True)], 1)
    if ids.shape[1] == vocabulary:  # nobody is left for the rest
        p, q = p[:, :-1], q[:, :-1]

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (torch.xlogy(a, a) - torch.xlogy(a, b)).sum()

    beta = mix.beta
    middle = beta * p + (1 - beta) * q
    divergence = {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, middle) + (1 - beta) * kl(q, middle),
    }[mix.divergence]()
    ce = F.cross_entropy(logits, wanted, reduction="sum")
    return mix.alpha * mix.temperature**2 * divergence + (1 - mix.alpha) * ce, ce, divergence


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kept", [KEPT, VOCABULARY])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_no_divergence_is_negative(divergence: Divergence, kept: int, scale: float) -> None:
    """Of 10,000 random pairs, in the precision of training."""
    pairs = 10_000
    soft = teach(draw(1, pairs, VOCABULARY, scale=scale), kept, dtype=torch.float32)
    logits = draw(2, pairs, VOCABULARY, scale=scale).float()
    wanted = torch.zeros(pairs, dtype=torch.int64)
    teacher = soft.take_chunk(slice(0, pairs), logits)
    kl = row_losses(logits, wanted, teacher, KDWeights(0.5, 1.0, divergence)).kl
    print(f"the least of {pairs} is {float(kl.min()):.3g}")
    assert kl.shape == (pairs,)
    assert float(kl.min()) >= -1e-7


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kept", [KEPT, VOCABULARY])
def test_it_is_zero_for_the_teacher_itself_and_pulls_nowhere(
    divergence: Divergence, kept: int
) -> None:
    logits = draw(3, 100, VOCABULARY).requires_grad_()
    soft = teach(logits.detach(), kept)
    wanted = torch.zeros(100, dtype=torch.int64)
    sums = token_losses(
        logits,
        torch.eye(VOCABULARY, dtype=torch.float64),
        wanted,
        soft,
        KDWeights(1.0, 1.0, divergence),
    )
    sums.loss.backward()
    assert abs(float(sums.kl)) < 1e-12
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-14


@pytest.mark.parametrize(("divergence", "share"), [("forward", 1), ("reverse", 1), ("jsd", 1 / 4)])
def test_a_high_temperature_flattens(divergence: Divergence, share: float) -> None:
    """T^2 D goes to the variance of the logits' difference, halved; its gradient to the centred
    difference over V (arXiv:1503.02531, equation 4). The curvature of the JSD is a quarter.
    """
    temperature, rows = 1000.0, 200
    theirs, mine = draw(4, rows, VOCABULARY), draw(5, rows, VOCABULARY).requires_grad_()
    flat = torch.softmax(theirs / temperature, -1)
    assert float((flat * VOCABULARY - 1).abs().max()) < 0.02
    wanted = torch.zeros(rows, dtype=torch.int64)
    soft = teach(theirs, VOCABULARY, temperature)
    eye = torch.eye(VOCABULARY, dtype=torch.float64)
    sums = token_losses(mine, eye, wanted, soft, KDWeights(1.0, temperature, divergence))
    sums.loss.backward()
    apart = mine.detach() - theirs
    apart = apart - apart.mean(1, keepdim=True)
    assert mine.grad is not None
    assert sums.loss.item() == pytest.approx(
        share * float(apart.square().mean(1).sum()) / 2, rel=1e-2
    )
    assert relative(mine.grad, share * apart / VOCABULARY) < 1e-2
    single = torch.autograd.grad(
        token_losses(
            mine, eye, wanted, teach(theirs, VOCABULARY), KDWeights(1.0, 1.0, divergence)
        ).loss,
        mine,
    )[0]
    assert relative(single, share * apart / VOCABULARY) > 0.5  # at temperature 1 it is none of this


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_without_alpha_it_is_the_cross_entropy(divergence: Divergence) -> None:
    hidden = draw(6, 300, 24, scale=1.0).requires_grad_()
    head = draw(7, VOCABULARY, 24, scale=1.0).requires_grad_()
    wanted = torch.arange(300) % VOCABULARY
    ce = F.cross_entropy(hidden @ head.T, wanted, reduction="sum")
    expected = torch.autograd.grad(ce, (hidden, head))
    taught = teach(draw(8, 300, VOCABULARY), KEPT)
    without = (None, None)
    for soft, mix in (without, *((taught, KDWeights(0.0, t, divergence)) for t in (1.0, 2.0))):
        sums = token_losses(hidden, head, wanted, soft, mix)
        found = torch.autograd.grad(sums.loss, (hidden, head))
        assert sums.loss.item() == pytest.approx(ce.item(), rel=1e-7)
        assert sums.ce.item() == pytest.approx(ce.item(), rel=1e-7)
        for mine, theirs in zip(found, expected, strict=True):
            assert relative(mine, theirs) < 1e-7


@pytest.mark.parametrize(
    ("divergence", "beta"), [*((each, 0.5) for each in DIVERGENCES), ("jsd", 0.1), ("jsd", 0.9)]
)
@pytest.mark.parametrize("kept", [KEPT, VOCABULARY])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_gradient_is_that_of_the_definition(
    divergence: Divergence, beta: float, kept: int, temperature: float
) -> None:
    """In fp32 against autograd in fp64, and in fp64 against finite differences."""
    rows, mix = 40, KDWeights(0.7, temperature, divergence, beta)
    hidden, head = draw(9, rows, 12, scale=1.0), draw(10, VOCABULARY, 12, scale=1.0)
    wanted = torch.arange(rows) % VOCABULARY
    soft = teach(draw(11, rows, VOCABULARY), kept, temperature, torch.float32)
    exact = [part.clone().requires_grad_() for part in (hidden, head)]
    loss, ce, kl = plainly(exact[0] @ exact[1].T, wanted, soft, mix)
    expected = torch.autograd.grad(loss, exact)
    single = [part.float().requires_grad_() for part in (hidden, head)]
    sums = token_losses(single[0], single[1], wanted, soft, mix)
    for mine, theirs in zip(torch.autograd.grad(sums.loss, single), expected, strict=True):
        error = relative(mine.double(), theirs)
        print(f"the gradient differs by {error:.2e} of its norm")
        assert error < 1e-5  # the contract is 1e-4
    for found, known in ((sums.loss, loss), (sums.ce, ce), (sums.kl, kl)):
        assert found.item() == pytest.approx(known.item(), rel=1e-5)

    for seed in range(3):
        along = [draw(20 + seed, *part.shape) for part in (hidden, head)]
        slope = sum(float((g * d).sum()) for g, d in zip(expected, along, strict=True))
        sides = [
            token_losses(hidden + step * along[0], head + step * along[1], wanted, soft, mix).loss
            for step in (1e-5, -1e-5)
        ]
        assert float(sides[0] - sides[1]) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_extreme_logits_stay_finite(divergence: Divergence, temperature: float) -> None:
    """A student that is sure of another token than a teacher that is sure; both fp32."""
    logits = torch.full((2, VOCABULARY), -300.0)
    logits[0, 1], logits[1, 0] = 300.0, 300.0
    theirs = torch.zeros(2, VOCABULARY, dtype=torch.float64)
    theirs[:, 0] = 200.0
    for kept in (1, VOCABULARY):
        hidden = logits.clone().requires_grad_()
        soft = teach(theirs, kept, temperature, torch.float32)
        sums = token_losses(
            hidden,
            torch.eye(VOCABULARY),
            torch.tensor([1, 0]),
            soft,
            KDWeights(1, temperature, divergence),
        )
        sums.loss.backward()
        assert hidden.grad is not None
        assert torch.isfinite(sums.loss)
        assert torch.isfinite(hidden.grad).all()
        assert hidden.grad[1].abs().max() < 1e-6  # agreed


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(kind="sampled", samples=10),
        Scheme(kind="topk", top_k=4, tail_samples=3),
    ],
    ids=lambda scheme: scheme.kind,
)
def test_draws_give_the_full_gradient_on_average(scheme: Scheme) -> None:
    """Deviations of the mean over many draws, in units of its own standard error."""
    positions, repeats = 6, 3000
    theirs, mine = draw(12, positions, VOCABULARY, scale=2.0), draw(13, positions, VOCABULARY)
    wanted = torch.zeros(positions, dtype=torch.int64)
    mix = KDWeights(1.0, 1.0, "forward")
    student = mine.clone().requires_grad_()
    _, _, kl = plainly(student, wanted, teach(theirs, VOCABULARY), mix)
    (expected,) = torch.autograd.grad(kl, student)

    rng = np.random.default_rng(14)
    every = repeats * positions
    ids = np.zeros(every + 1, np.int32)
    labels = np.array([IGNORED, *ids[1:]], np.int32)
    soft = make_targets(
        score(theirs.repeat(repeats, 1).numpy(), scheme, rng), scheme, 1.0, "forward"
    )
    logits = mine.repeat(repeats, 1)
    rows = soft_rows([Encoded(ids, labels, soft)]).take_chunk(slice(0, every), logits)
    losses = row_losses(logits, wanted.repeat(repeats), rows, mix)
    found = losses.gradient.view(repeats, positions, VOCABULARY)
    values = losses.kl.view(repeats, positions).sum(1)
    # A draw lowers a token's gradient; a token that hardly ever is drawn says nothing.
    drawn = (found < found.amax(0) - 1e-5).sum(0) >= 20
    error = found.mean(0) - expected
    deviation = (error / (found.std(0) / math.sqrt(repeats)))[drawn]
    assert len(deviation) > 100
    if scheme.kind == "topk":
        exactly = error.gather(1, theirs.topk(scheme.top_k).indices)
        assert float(exactly.abs().max()) < 1e-6
    print(f"mean square {float(deviation.square().mean()):.2f} of {len(deviation)}")
    assert 0.7 < float(deviation.square().mean()) < 1.4
    assert float(deviation.abs().max()) < 5
    spread = float(values.std()) / math.sqrt(repeats)
    assert abs(float(values.mean() - kl.detach())) < 4 * spread


class Largest(TorchDispatchMode):
    """Notes the largest matrix with a column for each token that anything makes."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                wide = tensor.dim() > 1 and tensor.shape[-1] == self._columns
                if wide or tensor.numel() % self._columns == 0:
                    self.elements = max(self.elements, tensor.numel())
        return made


@pytest.fixture
def few_logits(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let few logits exist at once."""
    monkeypatch.setattr(kd_loss, "LOGIT_ELEMENTS", 1000)
    return 1000


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_chunks_change_nothing_and_bound_what_exists(
    divergence: Divergence | None, temperature: float, few_logits: int, monkeypatch: Any
) -> None:
    rows = 333
    hidden = draw(15, rows, 12, scale=1.0).float().requires_grad_()
    head = draw(16, VOCABULARY, 12, scale=1.0).float().requires_grad_()
    wanted = torch.arange(rows) % VOCABULARY
    soft = mix = None
    if divergence is not None:
        soft = teach(draw(17, rows, VOCABULARY), KEPT, temperature, torch.float32)
        mix = KDWeights(0.7, temperature, divergence)

    def step() -> tuple[list[float], tuple[Tensor, ...], int]:
        with Largest(VOCABULARY) as largest:
            sums = token_losses(hidden, head, wanted, soft, mix)
            gradients = torch.autograd.grad(sums.loss, (hidden, head))
        return [float(part.detach()) for part in sums], gradients, largest.elements

    losses, gradients, most = step()
    assert most <= few_logits
    monkeypatch.setattr(kd_loss, "LOGIT_ELEMENTS", 1 << 25)
    at_once, expected, most = step()
    assert most >= rows * VOCABULARY  # the measure sees it
    assert losses == pytest.approx(at_once, rel=1e-6)
    for found, known in zip(gradients, expected, strict=True):
        assert relative(found, known) < 1e-6


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_tokens_one_by_one_are_the_full_distribution(divergence: Divergence) -> None:
    """`topk` of all tokens says what `full` says, in another order and by another road."""
    logits = draw(18, 30, VOCABULARY).numpy()
    ids = np.zeros(31, np.int32)
    labels = np.array([IGNORED, *ids[1:]], np.int32)
    mine = draw(19, 30, VOCABULARY)
    found: list[Tensor] = []
    for scheme in (
        Scheme(kind="full"),
        Scheme(kind="topk", top_k=VOCABULARY, tail_samples=0),
    ):
        scores = score(logits, scheme, np.random.default_rng(0))
        soft = soft_rows([Encoded(ids, labels, make_targets(scores, scheme, 1.0, divergence))])
        student = mine.clone().requires_grad_()
        eye = torch.eye(VOCABULARY, dtype=torch.float64)
        wanted = torch.zeros(30, dtype=torch.int64)
        sums = token_losses(student, eye, wanted, soft, KDWeights(1.0, 1.0, divergence))
        found += [sums.loss.detach(), *torch.autograd.grad(sums.loss, student)]
    assert float(found[0]) == pytest.approx(float(found[2]), rel=1e-6)
    assert relative(found[1], found[3]) < 1e-6
