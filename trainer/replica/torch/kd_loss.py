"""The loss of a language model: the next token, and a teacher's prediction of it.

    L = sum over target tokens of  alpha T^2 D(p, q) + (1 - alpha) CE

with p the teacher's and q = softmax(logits / T) the student's distribution, and T^2 so that the
scale of the gradient does not depend on T (Hinton et al., arXiv:1503.02531, section 2). D compares
buckets: each token that the teacher names is one, and all others together are another, `rest`.

    forward   KL(p || q)
    reverse   KL(q || p)
    jsd       beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q
              (generalised Jensen-Shannon divergence, arXiv:2306.13649, equation 1)

With g_b = dD/dq_b, which is -p_b / q_b, log(q_b / p_b) or (1 - beta) log(q_b / m_b) up to a
constant that cancels, the gradient to the logit of token j in bucket b is
q_j (g_b - sum_c q_c g_c) / T.

Logits and their gradient exist for a few rows at a time: both are made in one pass over the head,
whose weight gradient adds up on the way (as arXiv:2410.10989 does for the cross-entropy).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.config.distillation import Divergence
from trainer.model.families import PLAIN, Logits
from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.planning.stored_layers import split_head
from trainer.replica.torch.batch import SoftChunk, SoftTargetRows
from trainer.replica.torch.streaming import StreamedHead

_ENTRY_COST = 4  # an entry's indices and weights take about as much memory as this many logits
_LEAST = 1e-30  # replaces a probability that was rounded to zero


@dataclass(frozen=True)
class KDWeights:
    """The weights of the two losses."""

    alpha: float
    """Share of the divergence."""
    temperature: float
    divergence: Divergence
    beta: float = 0.5
    """The teacher's part in the mixture of `jsd`."""


class Sums(NamedTuple):
    """Summed over target tokens; fp64 `[]`."""

    loss: Tensor
    """The loss with a gradient."""
    ce: Tensor
    kl: Tensor
    """The divergence without alpha and T^2; 0 without a teacher."""


def token_losses(
    hidden: Tensor,
    head: Tensor | StreamedHead,
    wanted: Tensor,
    soft: SoftTargetRows | None = None,
    mix: KDWeights | None = None,
    shape: Logits = PLAIN,
) -> Sums:
    """Return the losses of N target tokens, with matmuls in the dtype of autocast or of `hidden`.

    Args:
        hidden: `[N, D]`, which predict the tokens.
        head: `[V, D]`.
        wanted: int64 `[N]` tokens.
        soft: a teacher's predictions, with `mix`; None for cross-entropy alone.
        shape: what becomes of the product with the head.
    """
    assert (soft is None) == (mix is None)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        found: Any = _TokenLosses.apply(
            hidden, head, wanted, soft, mix, shape, dtype, torch.is_grad_enabled()
        )
    return Sums(*found)


class _TokenLosses(torch.autograd.Function):
    """The gradients are computed in forward, while the logits exist, and scaled in backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        head: Tensor | StreamedHead,
        wanted: Tensor,
        soft: SoftTargetRows | None,
        mix: KDWeights | None,
        shape: Logits,
        dtype: torch.dtype,
        trains: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        to_hidden, to_head = (needed and trains for needed in ctx.needs_input_grad[:2])
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        head_gradient = None
        if isinstance(head, Tensor):
            head_gradient = torch.zeros_like(head) if to_head else None
            head = head.to(dtype)
        ce, kl = hidden.new_zeros(2, dtype=torch.float64)
        for parts in iterate_chunks(len(wanted), head, soft):
            rows = [hidden[part].to(dtype) for part in parts]
            chunks = multiply_head(rows, head, trains=to_hidden)
            for number, part in enumerate(parts):
                logits = chunks[number]
                slope = shape_logits(logits, shape)
                teacher = soft.take_chunk(part, logits) if soft is not None else None
                losses = row_losses(logits, wanted[part], teacher, mix)
                ce += losses.ce.sum(dtype=torch.float64)
                kl += losses.kl.sum(dtype=torch.float64)
                gradient = losses.gradient if slope is None else losses.gradient.mul_(slope)
                chunks[number] = gradient.to(dtype)
                del logits, losses, gradient  # before the next chunk takes as much
                if head_gradient is not None:
                    add_product(head_gradient, chunks[number].T, rows[number])
            if hidden_gradient is not None:
                for part, found in zip(parts, differentiate_head(chunks, head), strict=True):
                    hidden_gradient[part] = found
            del chunks
        ctx.gradients = hidden_gradient, head_gradient
        ctx.mark_non_differentiable(ce, kl)
        return _mix_losses(ce, kl, mix), ce, kl

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, scale: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "backward runs once: it gives its buffers away"
        found = [part if part is None else part.mul_(scale) for part in ctx.gradients]
        ctx.gradients = None
        return *found, None, None, None, None, None, None


def multiply_head(
    rows: Sequence[Tensor], head: Tensor | StreamedHead, *, trains: bool
) -> list[Tensor]:
    """Return logits `[n, V]`, at least in fp32, of each of some hidden states `[n, D]`.

    Args:
        head: `[V, D]`, in the dtype of `rows` if it is a tensor; each chunk is taken once.
        trains: `differentiate_head` follows.
    """
    dtype = rows[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    chunks = split_head(*head.shape)
    if len(chunks) == 1:
        taken = _take_rows(head, 0, chunks[0], dtype, trains=trains)
        return [torch.mm(each, taken.T).to(wide) for each in rows]
    logits = [each.new_empty(len(each), head.shape[0], dtype=wide) for each in rows]
    for number, chunk in enumerate(chunks):
        taken = _take_rows(head, number, chunk, dtype, trains=trains)
        for each, found in zip(rows, logits, strict=True):
            found[:, chunk] = torch.mm(each, taken.T)
        del taken  # of a head that is read, before the next ones are
    return logits


def differentiate_head(gradients: Sequence[Tensor], head: Tensor | StreamedHead) -> list[Tensor]:
    """Return the gradient `[n, D]` of hidden states by each of some of their logits, `[n, V]`.

    Sums over the vocabulary add one chunk after the other, from the last to the first, in fp32.
    """
    dtype = gradients[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    totals: list[Tensor] = []
    for number, chunk in reversed(list(enumerate(split_head(*head.shape)))):
        taken = _take_rows(head, number, chunk, dtype, trains=True)
        for place, gradient in enumerate(gradients):
            product = torch.mm(gradient[:, chunk], taken)
            if place == len(totals):
                totals.append(product)
            else:
                totals[place] = totals[place].to(wide).add_(product)
        del taken
    return totals


def _take_rows(
    head: Tensor | StreamedHead, number: int, chunk: slice, dtype: torch.dtype, *, trains: bool
) -> Tensor:
    if isinstance(head, Tensor):
        return head[chunk]
    return head.fetch_rows(number, dtype, trains=trains)


def shape_logits(logits: Tensor, shape: Logits) -> Tensor | float | None:
    """Make logits of the head's product in place; return the derivative, None if it is one."""
    if shape.divisor != 1:
        logits.div_(shape.divisor)
    if shape.cap is None:
        return None if shape.divisor == 1 else 1 / shape.divisor
    bounded = logits.div_(shape.cap).tanh_()
    slope = (1 - bounded.square()).div_(shape.divisor)
    logits.mul_(shape.cap)
    return slope


def add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two factors.

    It sums over tokens before any loss scale counts, so fp16 would overflow whatever the scale is.
    """
    if left.dtype == torch.float16:
        left, right = left.to(to.dtype), right.to(to.dtype)
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    else:  # the sum is more precise than the factors
        to += torch.mm(left, right)


def iterate_chunks(
    count: int, head: Tensor | StreamedHead, soft: SoftTargetRows | None
) -> Iterator[list[slice]]:
    """Yield rows whose logits may be held at once, in the chunks that products have."""
    entries = 0 if soft is None else -(-len(soft.ids) // max(1, count))
    rows = max(1, LOGIT_ELEMENTS // (head.shape[0] + _ENTRY_COST * entries))
    parts = [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
    together = head.logit_chunks if isinstance(head, StreamedHead) else 1
    for start in range(0, len(parts), together):
        yield parts[start : start + together]


class RowLosses(NamedTuple):
    """Losses of n target tokens."""

    ce: Tensor
    """`[n]`"""
    kl: Tensor
    """`[n]`, or `[]` zero without a teacher."""
    gradient: Tensor
    """`[n, V]`, of the mixed loss to the logits, in their memory."""


def row_losses(
    logits: Tensor, wanted: Tensor, teacher: SoftChunk | None, mix: KDWeights | None
) -> RowLosses:
    """Return the losses of n rows; overwrites their logits `[n, V]`."""
    rows, vocabulary = logits.shape
    target = torch.arange(rows, device=logits.device) * vocabulary + wanted
    chosen = logits.view(-1)[target]
    if teacher is None or mix is None:
        student = _softmax(logits)
        gradient = student.powers.mul_((1 / student.total)[:, None])
        gradient.view(-1)[target] -= 1
        return RowLosses(-student.log(chosen), gradient.new_zeros(()), gradient)

    scaled = mix.temperature != 1
    log_named = teacher.gather_entries(logits) / mix.temperature
    plain = _softmax(logits.clone()) if scaled else None
    student = _softmax(logits.div_(mix.temperature) if scaled else logits, teacher)
    ce = -(plain or student).log(chosen)
    for part in (student.peak, student.total.log()):
        log_named.sub_(teacher.repeat_per_entry(part))
    buckets = _Buckets(log_named.exp(), log_named, student.rest / student.total)
    kl, pull, slope = _DIVERGENCES[mix.divergence](teacher, buckets, mix.beta)

    strength, hard = mix.alpha * mix.temperature, 1 - mix.alpha
    shared = 0.0 if scaled else hard  # at temperature 1 both losses have one softmax
    gradient = student.powers.mul_(((strength * slope + shared) / student.total)[:, None])
    teacher.scatter_entries(gradient, pull.mul_(strength).add_(buckets.named, alpha=shared))
    if plain is not None:
        gradient.add_(plain.powers.mul_((hard / plain.total)[:, None]))
    gradient.view(-1)[target] -= hard
    return RowLosses(ce, kl, gradient)


class _Softmax(NamedTuple):
    """exp(logits - peak) of n rows and its sums."""

    powers: Tensor
    """`[n, V]`, with zeros for the teacher's tokens."""
    peak: Tensor
    """`[n]`"""
    total: Tensor
    """`[n]`, including those tokens."""
    rest: Tensor
    """`[n]`, without them: a separate sum, since 1 less the others has no correct digit."""

    def log(self, chosen: Tensor) -> Tensor:
        """Return the log-probabilities `[n]` of logits `[n]`."""
        return chosen - self.peak - self.total.log()


def _softmax(logits: Tensor, teacher: SoftChunk | None = None) -> _Softmax:
    peak = logits.amax(-1)
    powers = logits.sub_(peak[:, None]).exp_()
    if teacher is None:
        total = powers.sum(-1)
        return _Softmax(powers, peak, total, total)
    named = teacher.sum_entries(teacher.gather_entries(powers))
    teacher.scatter_entries(powers, 0)
    rest = powers.sum(-1)
    return _Softmax(powers, peak, rest + named, rest)


class _Buckets(NamedTuple):
    """A student's probabilities of the teacher's e tokens at n positions, and of the others."""

    named: Tensor
    """`[e]`"""
    log_named: Tensor
    """`[e]`"""
    rest: Tensor
    """`[n]`"""


_Slopes = tuple[Tensor, Tensor, Tensor]
"""A divergence `[n]`; of its gradient `q_j (g_j - c)` that of the named tokens `[e]`, and the
factor of q_j for all others `[n]`, without temperature and alpha. They overwrite `log_named`: of
whole distributions every further matrix costs as much as an exponential."""


def _forward_kl(teacher: SoftChunk, student: _Buckets, _: float) -> _Slopes:
    rest = student.rest.clamp(min=_LEAST)
    named = teacher.sum_entries(student.log_named.mul_(teacher.weights))
    kl = -named - teacher.rest * rest.log() - teacher.entropy
    mass = teacher.sum_entries(teacher.weights) + teacher.rest
    pull = (student.named * teacher.repeat_per_entry(mass)).sub_(teacher.weights)
    return kl, pull, mass - teacher.rest / rest


def _reverse_kl(teacher: SoftChunk, student: _Buckets, _: float) -> _Slopes:
    g = student.log_named - _safe_log(teacher.weights)
    g_rest = _safe_log(student.rest) - _safe_log(teacher.rest)
    kl = teacher.sum_entries(student.named * g) + student.rest * g_rest
    return kl, g.sub_(teacher.repeat_per_entry(kl)).mul_(student.named), g_rest - kl


def _jsd(teacher: SoftChunk, student: _Buckets, beta: float) -> _Slopes:
    log_p, log_p_rest, log_q_rest = map(_safe_log, (teacher.weights, teacher.rest, student.rest))
    of_p, of_q = math.log(beta), math.log(1 - beta)
    log_m = torch.logaddexp(log_p + of_p, student.log_named + of_q)
    log_m_rest = torch.logaddexp(log_p_rest + of_p, log_q_rest + of_q)
    g = (student.log_named - log_m) * (1 - beta)
    g_rest = (log_q_rest - log_m_rest) * (1 - beta)
    to_student = teacher.sum_entries(student.named * g) + student.rest * g_rest
    to_teacher = teacher.sum_entries(teacher.weights * (log_p - log_m)) + teacher.rest * (
        log_p_rest - log_m_rest
    )
    pull = g.sub_(teacher.repeat_per_entry(to_student)).mul_(student.named)
    return to_student + beta * to_teacher, pull, g_rest - to_student


_DIVERGENCES: dict[Divergence, Callable[[SoftChunk, _Buckets, float], _Slopes]] = {
    "forward": _forward_kl,
    "reverse": _reverse_kl,
    "jsd": _jsd,
}


def _safe_log(probability: Tensor) -> Tensor:
    return probability.clamp(min=_LEAST).log_()


def _mix_losses(ce: Tensor, kl: Tensor, mix: KDWeights | None) -> Tensor:
    if mix is None:
        return ce.clone()  # autograd needs distinct outputs
    return mix.alpha * mix.temperature**2 * kl + (1 - mix.alpha) * ce
