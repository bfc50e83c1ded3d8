"""The engine gguf: a GGUF file's weights as they are stored, computed by llama.cpp on the CPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.teacher_engines import check_teacher_backend
from trainer.distill.teacher.llama_cpp import LlamaCpp, last_error, load_llama_cpp
from trainer.distill.teacher.torch_engine import warn_if_from_disk
from trainer.distill.teacher.windows import WINDOW
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.gguf.source import Source, find_source, stored_types
from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.planning.teachers import gguf_batch
from trainer.replica.backend import Compute
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError

log = logging.getLogger(__name__)

_WINDOWS = 64
"""Windows of one forward; llama.cpp allows 256, and no more than tokens."""
_PAGE = 256
"""llama.cpp rounds the number of tokens with keys and values up to this."""


class GgufEngine:
    """A causal language model in a GGUF file, mapped.

    Short windows are read together; a long one is read in parts, with keys and values in fp32.

    Args:
        threads: None: as many as torch takes.

    Raises:
        InputError: the package is missing, or llama.cpp cannot open the file.
    """

    def __init__(self, source: Source, threads: int | None = None) -> None:
        self.device, self.place = torch.device("cpu"), "cpu"
        self._source = source
        self._library = load_llama_cpp(f"{source.path}: --engine gguf")
        self._threads = threads or torch.get_num_threads()
        self._model = self._library.open_model(source.path)
        if not self._model:
            raise InputError(
                f"{source.path}: llama.cpp cannot open it: {last_error(self._library.errors)}; use"
                " --engine torch"
            )
        self.vocab_size = self._library.vocab_size(self._model)
        self._rows = gguf_batch(self.vocab_size)
        self._cells = 0
        self._opened: list[int] = []
        weakref.finalize(self, _free_all, self._library, self._opened, self._model)

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """See `Engine`."""
        for group in _group_windows(batch, self._rows):
            yield from self._compute_logits(group)

    def _compute_logits(self, windows: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """Yield the logits of every token of windows, some rows at a time."""
        tokens = np.concatenate(windows)
        places = np.concatenate([np.arange(len(each), dtype=np.int32) for each in windows])
        numbers = np.repeat(
            np.arange(len(windows), dtype=np.int32), [len(each) for each in windows]
        )
        context = self._make_context(len(tokens))
        self._library.clear_cache(context)
        for first in range(0, len(tokens), self._rows):
            part = slice(first, first + self._rows)
            logits = self._library.compute_logits(
                context, tokens[part], places[part], numbers[part], self.vocab_size
            )
            self._source.check_unchanged()  # else these are of other weights
            yield torch.from_numpy(logits)

    def _make_context(self, tokens: int) -> int:
        """Return a context with room for so many tokens."""
        if tokens > self._cells:
            if self._opened:
                self._library.close_context(self._opened.pop())
            self._cells = 0  # without one, should the next not fit
            cells = max(self._rows, tokens)
            cells += -cells % _PAGE
            self._opened.append(
                self._library.open_context(
                    self._model,
                    cells=cells,
                    rows=self._rows,
                    windows=min(_WINDOWS, self._rows),
                    threads=self._threads,
                )
            )
            self._cells = cells
        return self._opened[0]


def _free_all(library: LlamaCpp, contexts: list[int], model: int) -> None:
    for context in contexts:
        library.close_context(context)
    library.close_model(model)


def _group_windows(
    batch: Sequence[NDArray[np.int32]], rows: int
) -> Iterator[list[NDArray[np.int32]]]:
    """Yield windows without their last tokens, which predict nothing, as groups for one forward.

    A group has at most `rows` tokens, or is one window.
    """
    group: list[NDArray[np.int32]] = []
    size = 0
    for window in batch:
        tokens = window[:-1]
        if group and (size + len(tokens) > rows or len(group) == min(_WINDOWS, rows)):
            yield group
            group, size = [], 0
        if len(tokens):
            group.append(tokens)
            size += len(tokens)
    if group:
        yield group


def needed_memory(model: Architecture) -> int:
    """Return the main memory that a forward takes beside the weights, in bytes; an estimate.

    Keys and values of a window of usual length, logits, activations.
    """
    rows = gguf_batch(model.vocab_size)
    cells = max(WINDOW, rows)
    kept = 8 * model.num_layers * model.num_kv_heads * model.head_dim * cells
    wide = max(model.intermediate_size, model.num_heads * (cells + model.head_dim))
    return kept + 4 * LOGIT_ELEMENTS + 4 * rows * 4 * wide


def open_gguf(model_dir: Path, compute: Compute) -> GgufEngine:
    """Open a teacher's GGUF file on the CPU.

    Args:
        model_dir: the folder that this process converted the file to.

    Raises:
        InputError: see `GgufEngine`; or a GPU is asked for, the model is no GGUF file, or it does
            not fit.
    """
    check_teacher_backend("gguf", compute.backend, compute.gpu)
    source = find_source(model_dir)
    if source is None:
        raise InputError(f"--engine gguf: {model_dir} is not a GGUF file; use another engine")
    source.check_unchanged()
    need = needed_memory(read_architecture(model_dir))
    free = free_memory(psutil.virtual_memory().available)
    if need > free:
        raise InputError(
            f"--engine gguf: {source.path} needs {need / 1e9:.1f} GB of main memory beside its"
            f" weights, and {free / 1e9:.1f} GB are free; stop other processes"
        )
    warn_if_from_disk(source.path, source.path.stat().st_size, free - need)
    log.info("the teacher is on cpu, by llama.cpp with weights in %s", stored_types(model_dir))
    return GgufEngine(source, compute.threads)
