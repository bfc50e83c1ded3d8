"""Check a folder's scores against its teacher by scoring a sample again."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.teacher_engines import REFERENCE_ENGINE, explain_resident
from trainer.data.order import permute_epoch
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.scores import Scheme, Scores, Window
from trainer.distill.teacher import admission
from trainer.distill.teacher.rows import Rows
from trainer.distill.teacher.scoring import Teacher, open_teacher
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.model.files import model_digest
from trainer.replica.backend import Compute
from trainer.system.errors import DoesNotFitError, InputError, RefusedError

log = logging.getLogger(__name__)

LIMIT = 0.01
"""Mean KL in nats above which the teacher is another one. Float noise is far below: bf16 against
fp32 gave less than a tenth of it at every position
(`tests/trainer/distill/teacher/test_teacher.py`)."""

_LEAST = 1e-9  # a probability that is zero by rounding
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result for a sample."""

    windows: int
    positions: int
    mean_kl: float
    """KL(stored || live) in nats a position, with everything not kept exactly as one token; of
    `sampled` estimated from the draws and the stored entropy, without bias."""
    standard_error: float
    """Standard error of the mean, over positions."""
    max_kl: float | None
    """Largest divergence of one position; None for `sampled`, where one position has no meaning."""
    same_draws: float | None
    """Share of the stored draws that recur; None if nothing is drawn."""
    limit: float = LIMIT
    """Limit of the mean: `LIMIT`, or more by what an admitted engine may differ."""

    @property
    def is_another_teacher(self) -> bool:
        """Whether the mean is above the limit beyond the sampling error."""
        return self.mean_kl - 3 * self.standard_error > self.limit

    def as_json(self) -> dict[str, Any]:
        """Return what `trainer distill audit --json` prints."""
        return {"schema": "motley.audit/1", **asdict(self)}


def check_teacher(folder: LogitsFolder, model: Path, tokenizer: Path) -> Vocabulary:
    """Return the vocabulary of a folder if it was written with this model and tokenizer.

    Raises:
        RefusedError: they differ, which names both hashes; or nothing can score it again.
        InputError: they cannot be used.
    """
    description = folder.description
    if (moved := description.scheme.removed_tokens) != "tail":
        raise RefusedError(
            f"{folder.path}: was scored with removed_tokens {moved} by an earlier version, and this"
            " one cannot score it again; a student can still learn from it"
        )
    vocabulary = Vocabulary.load_map(tokenizer, model)
    for name, there, here, where in (
        ("tokenizer", description.tokenizer.digest, vocabulary.tokenizer, tokenizer),
        ("teacher", description.teacher.digest, model_digest(model), model),
    ):
        if here != there:
            raise RefusedError(
                f"{where}: is not the {name} of {folder.path} ({here[:16]}, {there[:16]} wrote it)"
            )
    return vocabulary


def audit_limit(stored: str, engine: str) -> float:
    """Return the limit for scores of one engine that another one scores again."""
    return LIMIT if engine == stored else LIMIT + admission.LIMIT


def open_auditor(
    folder: LogitsFolder, model: Path, vocabulary: Vocabulary, compute: Compute
) -> tuple[str, Teacher]:
    """Open the independent engine, or the folder's own if the memory is too small for that.

    Raises:
        InputError: the model cannot be loaded, or fits by neither.
    """
    description = folder.description
    own = description.teacher.engine
    try:
        return REFERENCE_ENGINE, open_teacher(
            model, vocabulary, description, compute, engine=REFERENCE_ENGINE
        )
    except DoesNotFitError as error:
        if own == REFERENCE_ENGINE or explain_resident(own, compute.resident):
            raise
        log.warning(
            "%s; the engine that wrote the scores, %s, scores again, which cannot find its own"
            " errors",
            error,
            own,
        )
    return own, open_teacher(model, vocabulary, description, compute)


def audit_windows(
    folder: LogitsFolder,
    teacher: Teacher,
    *,
    fraction: float,
    seed: int = 0,
    limit: float = LIMIT,
) -> AuditResult:
    """Score a sample of windows again and compare.

    Args:
        limit: see `AuditResult`.
        fraction: of the existing windows; at least one is taken.
        seed: of the sample, which depends only on it and the existing windows.

    Raises:
        InputError: there is nothing to compare.
        StorageError: a shard is damaged.
    """
    description = folder.description
    kls: list[_Floats] = []
    again = drawn = windows = 0
    for window in _sample_windows(folder, fraction, seed):
        windows += 1
        for stored, rows, log_p in _score_again(teacher, window, description.scheme.temperature):
            is_scored = np.diff(stored.offsets) > 0  # a prompt is not
            kls.append(_kl_divergences(stored, log_p, description.scheme)[is_scored])
            again += _common_draws(stored, rows)
            drawn += int(stored.counts.sum())
    kl = np.concatenate(kls) if kls else np.zeros(0)
    if not kl.size:
        raise InputError(f"{folder.path}: no scored token among the drawn windows; draw more")
    return AuditResult(
        windows=windows,
        positions=kl.size,
        mean_kl=float(kl.mean()),
        standard_error=float(kl.std()) / math.sqrt(kl.size),
        max_kl=None if description.scheme.kind == "sampled" else float(kl.max()),
        same_draws=again / drawn if drawn else None,
        limit=limit,
    )


def _sample_windows(folder: LogitsFolder, fraction: float, seed: int) -> Iterator[Window]:
    """Yield windows of the complete shards, drawn without replacement, shard by shard."""
    plans = [plan for plan in folder.plans if folder.is_complete(plan.number)]
    bounds = np.cumsum([0, *(plan.windows for plan in plans)])
    total = int(bounds[-1])
    chosen = np.sort(permute_epoch(seed, 0, total)[: max(1, round(fraction * total))])
    for plan, first, stop in zip(plans, bounds[:-1], bounds[1:], strict=True):
        inside = chosen[(chosen >= first) & (chosen < stop)] - first
        if inside.size:
            windows = folder.read_shard(plan.number)
            yield from (windows[int(index)] for index in inside)


def _score_again(
    teacher: Teacher, window: Window, temperature: float
) -> Iterator[tuple[Scores, Rows, Tensor]]:
    """Yield positions with the stored scores, the new ones, and the teacher's log p `[n, S]`."""
    piece = UnscoredWindow(window.document, window.start, window.tokens)
    points = teacher.draw_uniforms(piece)
    done = 0
    for logits in teacher.engine.iterate_logits([teacher.teacher_ids[window.tokens]]):
        stop = done + len(logits)
        rows = teacher.scorer.score_rows(logits, points[done:stop])
        yield (
            _slice_scores(window.scores, done + 1, stop + 1),
            rows,
            _log_p(logits, temperature, teacher),
        )
        done = stop


def _slice_scores(scores: Scores, first: int, stop: int) -> Scores:
    """Return some positions of a window."""
    begin, end = int(scores.offsets[first]), int(scores.offsets[stop])
    return Scores(
        scores.offsets[first : stop + 1] - begin,
        scores.ids[begin:end],
        None if scores.logprobs is None else scores.logprobs[begin:end],
        scores.counts[begin:end],
        scores.tail[first:stop],
        scores.dropped[first:stop],
        scores.entropy[first:stop],
    )


def _log_p(logits: Tensor, temperature: float, teacher: Teacher) -> Tensor:
    """Return the teacher's log-probabilities of the student's tokens, `[n, S]`."""
    log_p = (logits.float() / temperature).log_softmax(1)
    own = torch.from_numpy(teacher.teacher_ids).long().to(log_p.device)
    return log_p.index_select(1, own)


def _kl_divergences(stored: Scores, log_p: Tensor, scheme: Scheme) -> _Floats:
    """Return KL(stored || live) of each position, see `AuditResult.mean_kl`, `[n]`."""
    count = len(stored.tail)
    row = np.repeat(np.arange(count), np.diff(stored.offsets))
    columns = torch.from_numpy(stored.ids).long().to(log_p.device)
    log_q = log_p[torch.from_numpy(row).to(log_p.device), columns].double().cpu().numpy()

    def sum_by_position(
        values: NDArray[Any], of: NDArray[np.bool_] | slice = slice(None)
    ) -> _Floats:
        return np.bincount(row[of], values, count).astype(np.float64)

    if scheme.kind == "sampled":
        mass = log_p.double().logsumexp(1).cpu().numpy()
        surprise = sum_by_position(stored.counts * (mass[row] - log_q)) / scheme.samples
        return surprise - stored.entropy
    assert stored.logprobs is not None
    kept = stored.counts == 0
    p_log = stored.logprobs[kept].astype(np.float64)
    p, tail = np.exp(p_log), stored.tail.astype(np.float64)
    live_tail = np.maximum(1 - sum_by_position(np.exp(log_q[kept]), kept), _LEAST)
    whole = sum_by_position(p, kept) + tail  # in half precision it is not exactly 1
    inside = sum_by_position(p * (p_log - log_q[kept]), kept)
    outside = tail * np.log(np.maximum(tail, _LEAST) / live_tail)
    with np.errstate(divide="ignore", invalid="ignore"):  # positions without scores
        return (inside + outside) / whole - np.log(whole)


def _common_draws(stored: Scores, rows: Rows) -> int:
    """Return how many of the stored draws recur."""
    common = 0
    for position, (first, stop) in enumerate(pairwise(stored.offsets)):
        counts = stored.counts[first:stop]
        now = (rows.drawn[position] == stored.ids[first:stop, None]).sum(1)
        common += int(np.minimum(counts, now).sum())
    return common
