"""The admission of an engine: before it writes, it scores a sample beside transformers.

An engine can be wrong on one model or one processor alone, and an audit that scores again with the
same engine would not see it. Quantised weights cost 0.002 to 0.01 nats; a published engine whose
kernels were wrong for one format was 1.5 nats away, with text that looked right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.run import Quantization
from trainer.distill.teacher.engines import Engine
from trainer.distill.teacher.torch_engine import TorchEngine, check_room, weight_bytes
from trainer.system.cgroups import free_memory
from trainer.system.errors import RefusedError

log = logging.getLogger(__name__)

TOKENS = 512
"""Tokens of the sample: the corpus's first ones."""
LIMIT = 0.02
"""Mean KL in nats above which an engine is refused."""

_FLOOR = -1e30  # of an impossible token, so that it counts as 0 in a sum


def admit_engine(
    engine: Engine,
    name: str,
    model_dir: Path,
    windows: Sequence[NDArray[np.int32]],
    *,
    quantization: Quantization = "none",
) -> float | None:
    """Return KL(transformers || engine) in nats a position; None without a position to compare.

    Args:
        name: the engine's, for messages.
        windows: teacher token ids, `[T]` each.
        quantization: of transformers' weights.

    Raises:
        RefusedError: the KL is above `LIMIT`, or the engine computes NaN or Inf.
        InputError: transformers cannot load the model, or it does not fit beside the engine.
    """
    if len(windows) == 1:
        windows = np.split(windows[0], [2 * len(windows[0]) // 3])
    windows = [window for window in windows if len(window) > 1]
    positions = sum(len(window) - 1 for window in windows)
    if not positions:
        return None
    dtype = _reference_dtype(model_dir, quantization)
    check_room(model_dir, dtype, quantization=quantization)
    reference = TorchEngine(model_dir, dtype, published=True, quantization=quantization)
    if engine.vocab_size != reference.vocab_size:
        raise RefusedError(
            f"--engine {name}: {model_dir} has {reference.vocab_size:,} logits in transformers and"
            f" {engine.vocab_size:,} here; use another engine"
        )
    total = 0.0
    for first in range(0, len(windows), 2):
        batch = windows[first : first + 2]  # padded, as those of the pass are
        alone = chain.from_iterable(_iterate_rows(reference, [window]) for window in batch)
        pairs = zip(alone, _iterate_rows(engine, batch), strict=True)
        total += sum(_kl_divergence(log_p, log_q) for log_p, log_q in pairs)
    kl = total / positions
    if not kl <= LIMIT:
        found = f"{kl:.3g} nats" if math.isfinite(kl) else "NaN or Inf"
        raise RefusedError(
            f"--engine {name}: {model_dir} scored by it is {found} from transformers' on"
            f" {positions} positions (at most {LIMIT}); use another engine, such as torch"
        )
    log.info("the engine %s is %.2g nats from transformers on %d positions", name, kl, positions)
    return max(kl, 0.0)  # it is below by rounding alone


def _reference_dtype(model_dir: Path, quantization: Quantization) -> torch.dtype:
    """Return float32 if what is not mapped in it fits beside the engine, else bfloat16."""
    loaded, _ = weight_bytes(model_dir, torch.float32, quantization)
    free = free_memory(psutil.virtual_memory().available)
    return torch.float32 if loaded < free else torch.bfloat16


def _iterate_rows(engine: Engine, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
    """Yield log-probabilities of positions 1 to T - 1, `[vocab_size]` in fp64 each."""
    for logits in engine.iterate_logits(batch):
        for row in logits:
            yield row.cpu().double().log_softmax(0).clamp(min=_FLOOR)


def _kl_divergence(log_p: Tensor, log_q: Tensor) -> float:
    return float((log_p.exp() * (log_p - log_q)).sum())
