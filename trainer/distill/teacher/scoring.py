"""A teacher scores pieces of text and returns windows with scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.teacher_engines import explain_quantization
from trainer.distill.logits.description import Description
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.teacher.engines import Engine, engine_kind, read_weight_type
from trainer.distill.teacher.logits_compression import Scorer, draw_uniforms
from trainer.distill.teacher.rows import Rows
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.planning.forward import ForwardSize
from trainer.planning.teachers import BATCH
from trainer.replica.backend import Compute
from trainer.replica.microbatch import MicroBatchLimit, split_by_length
from trainer.system.errors import InputError, NonFiniteError, is_out_of_memory

_ANY_NUMBER = 1 << 62


class Teacher:
    """An engine that scores for one student's vocabulary.

    Args:
        teacher_ids: the teacher's token for each of the student's, `[S]`.
        seed: of the draws.
        batch_tokens: the most tokens of one forward, padding included.
    """

    def __init__(
        self,
        engine: Engine,
        scheme: Scheme,
        teacher_ids: NDArray[np.int32],
        seed: int,
        batch_tokens: int,
    ) -> None:
        self.engine, self.teacher_ids, self._seed = engine, teacher_ids, seed
        self.scorer = Scorer(scheme, teacher_ids, engine.vocab_size, engine.device)
        self._with_logprobs = scheme.kind != "sampled"
        self._limit = MicroBatchLimit(_ANY_NUMBER, batch_tokens)

    def score_pieces(
        self, pieces: Sequence[UnscoredWindow], on_tokens: Callable[[int], None] = lambda _: None
    ) -> list[Window]:
        """Return pieces with their scores, in their order.

        They are read in batches of about equal length. The batches depend on these pieces alone,
        so that scoring a shard again gives the same numbers.

        Args:
            on_tokens: called after each batch with its number of tokens.

        Raises:
            NonFiniteError: the model computes NaN or Inf; names the document.
            InputError: not even one window fits into the device's memory.
        """
        scored: dict[int, Window] = {}
        while waiting := [index for index in range(len(pieces)) if index not in scored]:
            for group in split_by_length(
                [len(pieces[index].tokens) for index in waiting], self._limit
            ):
                indices = [waiting[place] for place in group]
                batch = [pieces[index] for index in indices]
                try:
                    windows = self._score_batch(batch)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    windows = None
                if windows is None:  # outside the handler: its traceback keeps activations alive
                    self._halve_batch(batch)
                    break
                scored.update(zip(indices, windows, strict=True))
                on_tokens(sum(len(piece.tokens) for piece in batch))
        return [scored[index] for index in range(len(pieces))]

    def _score_batch(self, batch: Sequence[UnscoredWindow]) -> list[Window]:
        """Score one batch."""
        points = np.concatenate([self.draw_uniforms(piece) for piece in batch])
        wanted = np.concatenate([piece.is_scored[1:] for piece in batch])
        parts: list[Rows] = []
        done = 0
        for logits in self._batch_logits(batch):
            here = done + np.flatnonzero(wanted[done : done + len(logits)])
            parts.append(self.scorer.score_rows(_select_rows(logits, here - done), points[here]))
            done += len(logits)
        rows = Rows.concatenate_rows(parts)
        bounds = np.cumsum([0, *(piece.is_scored.sum() for piece in batch)])
        return [
            self._make_window(piece, rows[first:stop])
            for piece, (first, stop) in zip(batch, pairwise(bounds), strict=True)
        ]

    def _batch_logits(self, batch: Sequence[UnscoredWindow]) -> Iterable[Tensor]:
        """Return the logits of a batch in parts, at least one."""
        if all(len(piece.tokens) == 1 for piece in batch):  # nothing is predicted
            return [torch.zeros((0, self.engine.vocab_size), device=self.engine.device)]
        return self.engine.iterate_logits([self.teacher_ids[piece.tokens] for piece in batch])

    def _make_window(self, piece: UnscoredWindow, rows: Rows) -> Window:
        if not rows.finite:
            raise NonFiniteError(
                f"document {piece.document}, token {piece.start} and after: NaN or Inf among the"
                " teacher's logits; the weights are damaged, or too large for its dtype"
            )
        scores = rows.to_scores(piece.is_scored, with_logprobs=self._with_logprobs)
        return Window(piece.document, piece.start, piece.tokens, scores)

    def _halve_batch(self, batch: Sequence[UnscoredWindow]) -> None:
        """Halve the batch size after a batch that did not fit."""
        longest = max(len(piece.tokens) for piece in batch)
        smaller = self._limit.halve_limit(len(batch), len(batch) * longest)
        if smaller is None:
            raise InputError(
                f"{self.engine.place}: a window of {longest} tokens does not fit; lower"
                " --max-seq-len"
            )
        self._limit = smaller
        torch.cuda.empty_cache()

    def draw_uniforms(self, piece: UnscoredWindow) -> NDArray[np.float64]:
        """Return the uniform numbers of a piece's draws, `[T - 1, draws]`."""
        positions = len(piece.tokens) - 1
        return draw_uniforms(self._seed, piece.document, piece.start, positions, self.scorer.draws)


def _select_rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    if len(rows) == len(logits):
        return logits
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device, non_blocking=True))


def open_teacher(
    model_dir: Path,
    vocabulary: Vocabulary,
    description: Description,
    compute: Compute,
    *,
    batch_tokens: int | None = None,
    engine: str | None = None,
) -> Teacher:
    """Load a folder's teacher, on CUDA if that works, else on the CPU.

    Args:
        engine: None: the folder's.

    Raises:
        InputError: the model cannot be loaded, or the engine is not here, or has other weights.
    """
    if compute.threads is not None:
        torch.set_num_threads(compute.threads)
    engine, weights = engine or description.teacher.engine, read_weight_type(description.teacher)
    if reason := explain_quantization(engine, weights.quantization):
        raise InputError(reason)
    forward = ForwardSize(batch_tokens or 0, description.max_seq_len)
    opened = engine_kind(engine).open(model_dir, weights, compute, forward)
    return Teacher(
        opened,
        description.scheme,
        vocabulary.teacher_ids,
        description.seed,
        batch_tokens or BATCH["cpu" if opened.device.type == "cpu" else "cuda"],
    )
