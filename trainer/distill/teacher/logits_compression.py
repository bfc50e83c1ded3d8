"""Reduce a teacher's logits to the part of its distribution that a scheme keeps.

Every pass over the vocabulary costs as much as a layer of a small teacher, so there are few, over
few rows at a time, which fit the caches. The vocabulary is split into B x M strided blocks: the k
largest logits are in the k blocks with the largest maxima, and a draw first selects a block by its
sum, then a token in it. Both are exact.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.distill.teacher.rows import Rows

if TYPE_CHECKING:
    from trainer.distill.logits.scores import Scheme

BLOCK = 64
"""Tokens in a block; near the square root of V / k both levels of a search cost the same."""
_FLOOR = -1e30  # of an impossible token; columns of padding have -Inf, so they are never kept
_NOTHING = 1e-30  # mass below which there is nothing to spread over, and nothing to draw
_WORD = (1 << 64) - 1
_STREAM = int.from_bytes(b"draws", "little")  # separates these draws from others of the seed
_CPU_ELEMENTS = 1 << 20  # of a working buffer for each thread, which fits the caches
_DEVICE_ELEMENTS = 1 << 27


def draw_uniforms(
    seed: int, document: int, start: int, positions: int, draws: int
) -> NDArray[np.float64]:
    """Return draws of U[0, 1) for a window, `[positions, draws]`.

    They are Philox4x64-10 (Salmon et al., SC 2011) keyed by seed and document and counted from the
    window's start, so that a window scored again, in any batch and process, draws the same.
    """
    key = np.array([seed & _WORD, document], dtype=np.uint64)
    counter = np.array([0, 0, start, _STREAM], dtype=np.uint64)
    raw = np.random.Philox(counter=counter, key=key).random_raw(positions * draws)
    return (raw >> np.uint64(11)).astype(np.float64).reshape(positions, draws) * 2.0**-53


class Scorer:
    """Scores positions of one teacher for one student's vocabulary.

    Args:
        teacher_ids: the teacher's token for each of the student's, `[S]`.
        vocab_size: columns of the teacher's logits; those without a student's token are dropped.
        device: of the logits.
        rows: positions that are scored at once; None: as many as fit the caches.
    """

    def __init__(
        self,
        scheme: Scheme,
        teacher_ids: NDArray[np.int32],
        vocab_size: int,
        device: torch.device | str = "cpu",
        rows: int | None = None,
    ) -> None:
        self._scheme = scheme
        self._size, self._vocab_size = len(teacher_ids), vocab_size
        self._kept = min(scheme.top_k, self._size) if scheme.kind == "topk" else 0
        self.draws = {"topk": scheme.tail_samples, "sampled": scheme.samples, "full": 0}[
            scheme.kind
        ]
        """Uniform numbers for each position."""
        on_cpu = torch.device(device).type == "cpu"
        elements = _CPU_ELEMENTS * torch.get_num_threads() if on_cpu else _DEVICE_ELEMENTS
        rows = rows or max(1, elements // vocab_size)
        in_order = np.array_equal(teacher_ids, np.arange(self._size))
        self._ids = None if in_order else torch.from_numpy(teacher_ids).long().to(device)
        """None: the student's tokens are the teacher's first ones."""

        def allocate_buffers(columns: int) -> tuple[Tensor, Tensor]:
            shape = (rows, -(-columns // BLOCK) * BLOCK)
            log_p = torch.full(shape, -math.inf, dtype=torch.float32, device=device)
            return log_p, torch.zeros_like(log_p)  # the columns of padding do not change

        self._whole = allocate_buffers(vocab_size)
        self._own = self._whole if in_order else allocate_buffers(self._size)

    @torch.no_grad()
    def score_rows(self, logits: Tensor, uniforms: NDArray[np.float64]) -> Rows:
        """Return the kept scores of N positions.

        Args:
            logits: `[N, V]` of any float type, on the scorer's device.
            uniforms: `[N, draws]`, see `draw_uniforms`.
        """
        assert logits.shape[1] == self._vocab_size, f"{logits.shape} is not (N, {self._vocab_size})"
        assert uniforms.shape == (len(logits), self.draws)
        points = torch.from_numpy(uniforms).to(logits.device, non_blocking=True)
        step = len(self._whole[0])
        parts = [
            self._score_buffered(logits[first : first + step], points[first : first + step])
            for first in range(0, max(len(logits), 1), step)
        ]
        kept, *others = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
        if self._scheme.kind == "full":
            kept = np.broadcast_to(np.arange(self._size, dtype=np.int32), others[0].shape)
        return Rows(kept, *others)

    def _score_buffered(self, logits: Tensor, points: Tensor) -> tuple[Tensor, ...]:
        """Score as many rows as a buffer holds; returns the fields of `Rows`."""
        log_p, p = self._student_probabilities(logits)
        kept = _top_columns(log_p, self._kept)
        kept_log_p, kept_p = log_p.gather(1, kept), p.gather(1, kept)
        p.scatter_(1, kept, 0.0)
        masses = p.unflatten(1, (BLOCK, -1)).sum(1)
        below, known = masses.sum(1), kept_p.sum(1)
        dropped = (1 - known - below).clamp_(min=0)
        if self._size == self._vocab_size:
            dropped.zero_()
        drawn = self._draw_tokens(p, masses, points)
        drawn_log_p = log_p.gather(1, drawn.clamp(min=0))
        p_log_p = p[:, : self._size].mul_(log_p[:, : self._size]).sum(1)  # 0 x -Inf is NaN
        tail = below + dropped
        if self._scheme.kind == "topk":
            # The tail is spread over the tokens below in proportion; without any, over the kept.
            spread = torch.where(below > _NOTHING, tail / below, 0.0)
            scale = torch.where(below > _NOTHING, 1.0, 1 / known)
            entropy = _scaled_entropy((kept_p * kept_log_p).sum(1), known, scale)
            entropy += _scaled_entropy(p_log_p, below, spread)
        else:
            entropy = _scaled_entropy(p_log_p, below, 1 / below)
            if self._scheme.kind == "sampled":
                tail = torch.ones_like(tail)
            else:
                kept_log_p, tail = log_p[:, : self._size].clone(), dropped
        return kept.int(), kept_log_p, drawn.int(), drawn_log_p, tail, dropped, entropy

    def _student_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p and p of the student's tokens, `[n, columns]`, in the buffers."""
        count = len(logits)
        log_p, p = (buffer[:count] for buffer in self._whole)
        log_p[:, : self._vocab_size] = logits
        if self._scheme.temperature != 1:
            log_p.div_(self._scheme.temperature)
        torch.softmax(log_p, 1, out=p)
        log_p.sub_((log_p.amax(1) - p.amax(1).log())[:, None])
        log_p[:, : self._vocab_size].clamp_(min=_FLOOR)
        if self._ids is None:
            log_p[:, self._size :], p[:, self._size :] = -math.inf, 0.0
            return log_p, p
        own_log_p, own_p = (buffer[:count] for buffer in self._own)
        own_log_p[:, : self._size] = log_p.index_select(1, self._ids)
        own_p[:, : self._size] = p.index_select(1, self._ids)
        return own_log_p, own_p

    def _draw_tokens(self, p: Tensor, masses: Tensor, points: Tensor) -> Tensor:
        """Return tokens by the inverse of the distribution function, `[n, D]`.

        Args:
            p: unnormalised; a token without mass is never drawn.
            masses: its sums over the blocks, `[n, M]`.
            points: fp64 in [0, 1), `[n, D]`.
        """
        if self.draws == 0:
            return points.long()
        blocks = p.unflatten(1, (BLOCK, -1))
        width = blocks.shape[2]
        masses = masses.double()
        sums = masses.cumsum(1)
        targets = points * sums[:, -1:]
        block = torch.searchsorted(sums, targets, right=True).clamp_(max=width - 1)
        mass = masses.gather(1, block)
        into = (targets - (sums.gather(1, block) - mass)) / mass
        inside = blocks.gather(2, block[:, None].expand(-1, BLOCK, -1)).double().cumsum(1)
        total = inside[:, -1:]
        # Rounding may put a point on the block's end: take its last token with mass.
        place = torch.minimum((inside <= into[:, None] * total).sum(1), (inside < total).sum(1))
        return torch.where(sums[:, -1:] > _NOTHING, place * width + block, -1)


def _top_columns(values: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest of each row, the largest first, `[n, count]`."""
    blocks = values.unflatten(1, (BLOCK, -1))
    width = blocks.shape[2]
    if width <= count:
        return values.topk(count, 1).indices
    best = blocks.amax(1).topk(count, 1).indices
    inside = blocks.gather(2, best[:, None].expand(-1, BLOCK, -1)).flatten(1)
    place = inside.topk(count, 1).indices
    return place // count * width + best.gather(1, place % count)


def _scaled_entropy(p_log_p: Tensor, mass: Tensor, scale: Tensor) -> Tensor:
    """Return -sum q log q of q = scale x p from the sums of p log p and of p, `[n]`."""
    return -scale * p_log_p - torch.special.xlogy(scale * mass, scale)
