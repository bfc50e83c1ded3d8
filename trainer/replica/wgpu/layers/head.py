"""From the last hidden states to the loss and back: pooled classifier or language model.

Only rows with targets are computed: the last token of each sample, or the positions with a target.
They come in chunks of fixed size, so that one recording serves any number of them. The vocabulary
comes in chunks of a head's rows, and these in windows, so that a large one needs no `[rows, V]`
array: forward from the first on, and with a gradient back from the last, which are still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.planning.stored_layers import split_head
from trainer.planning.vulkan_buffers import logit_window_bytes
from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.cross_entropy import (
    argmax_rows,
    cross_entropy_gradient,
    cross_entropy_loss,
    cross_entropy_start,
    cross_entropy_window,
)
from trainer.replica.wgpu.kernels.distillation import TeacherPredictions, distillation_gradient
from trainer.replica.wgpu.kernels.finite import mark_non_finite
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.norm import rms_norm
from trainer.replica.wgpu.kernels.pool import gather_rows, scatter_rows
from trainer.replica.wgpu.layers.decoder_layer import Norm, norm_backward


@dataclass(frozen=True)
class Targets:
    """The targets of one chunk of N rows; all on the device."""

    rows: Array
    """u32 `[N]`: which hidden states; `SKIPPED` for none."""
    classes: Array
    """u32 `[N, 1]`"""
    counts: Array
    """f32 `[N, 1]`, 1 or, for a row that does not count, 0."""
    teacher: TeacherPredictions | None = None
    """The rows' teacher, beside their classes."""


@dataclass(frozen=True)
class LossSums:
    """The sums of results over a step; all on the device."""

    loss: Array
    """f32 `[1]`, `+=` the sum over rows of the cross-entropy against classes."""
    taught: Array
    """f32 `[1]`, `+=` the sum over rows of the cross-entropy against a teacher."""
    flag: Array
    """u32 `[1]`, 1 after a NaN or Inf."""


@dataclass(frozen=True)
class HeadRows:
    """Consecutive rows of a head's output matrix."""

    first: int
    """Rows before them."""
    weight: Array
    gradient: Array | None = None

    @property
    def count(self) -> int:
        """Classes whose rows they are."""
        return self.weight.shape[0]

    def slice_rows(self, start: int, stop: int) -> HeadRows:
        """Return some of them, the first at an aligned byte."""
        gradient = None if self.gradient is None else self.gradient.slice_rows(start, stop)
        return HeadRows(self.first + start, self.weight.slice_rows(start, stop), gradient)

    def split_rows(self, limit: int) -> list[HeadRows]:
        """Return them in windows of so many bytes of weights at most."""
        return [self.slice_rows(*window) for window in iterate_windows(self.weight, limit)]


def split_matrix(weight: Array, gradient: Array | None) -> list[HeadRows]:
    """Return an output matrix `[V, D]` on the device in the chunks of `split_head`."""
    whole, (rows, columns) = HeadRows(0, weight, gradient), weight.shape
    return [whole.slice_rows(chunk.start, chunk.stop) for chunk in split_head(rows, columns)]


@dataclass(frozen=True)
class Head:
    """Final norm and output matrix `[V, D]`, which may be the embedding."""

    norm: Norm
    chunks: Sequence[HeadRows]
    """The matrix; its products are those with one after the other."""
    eps: float
    streams: bool = False
    """Each chunk is written before it is used, and has a segment of its own: `S.forward.N` and
    `S.backward.N` after the segment S in which a recording begins."""

    def loss(
        self,
        graph: Graph,
        pool: MemoryPool,
        x: Array,
        targets: Targets,
        sums: LossSums,
        *,
        dx: Array | None = None,
        predictions: Array | None = None,
    ) -> None:
        """Record the loss of one chunk of x `[M, D]`, and with dx its gradient.

        dx `[M, D]` gets the chunk's rows (`=`), others stay. predictions u32 `[N]` are the classes
        of the largest logits; only where one window holds all classes.
        """
        segment = self._find_segment(graph)
        count, width = targets.rows.size, x.shape[1]
        picked, normed = pool.take((count, width)), pool.take((count, width))
        gather_rows(graph, x, targets.rows, picked)
        rms_norm(graph, picked, self.norm.weight, normed, eps=self.eps)
        mark_non_finite(graph, normed, sums.flag)

        objective = _Objective.start(graph, pool, targets)
        rows, columns = self.chunks[0].weight.shape
        kind, limit = self.chunks[0].weight.kind, graph.binding_limit
        window_bytes = logit_window_bytes(rows, columns, kind, count, limit)
        chunks = [chunk.split_rows(window_bytes) for chunk in self.chunks]
        logits = pool.take((count, chunks[0][0].count), purpose="logits")
        for number, windows in enumerate(chunks):
            self._begin_chunk(graph, segment, "forward", number)
            for window in windows:
                part = _record_logits(graph, normed, logits, window)
                objective.add_window(graph, part, window.first)
        last = chunks[-1][-1]
        if predictions is not None:
            assert last.first == 0, "predictions need all classes in one window"
            argmax_rows(graph, logits, predictions)
        objective.loss(graph, sums)
        if dx is not None:
            dnormed = pool.take((count, width))
            for number, windows in reversed(list(enumerate(chunks))):
                self._begin_chunk(graph, segment, "backward", number)
                for window in reversed(windows):
                    part = Array(logits.buffer, (count, window.count), offset=logits.offset)
                    if window is not last:  # which still has its logits
                        part = _record_logits(graph, normed, logits, window)
                    objective.record_gradient(graph, part, window.first)
                    accumulate = window is not last
                    _window_backward(graph, normed, part, dnormed, window, accumulate=accumulate)
            dpicked = pool.take((count, width))
            norm_backward(
                graph, pool, self.norm, picked, dnormed, dpicked, eps=self.eps, accumulate=False
            )
            scatter_rows(graph, dpicked, targets.rows, dx)
            pool.give_back(dnormed)
            pool.give_back(dpicked)
        for array in (picked, normed, *objective.states, logits):
            pool.give_back(array)

    def logits(self, graph: Graph, pool: MemoryPool, x: Array, out: Array) -> None:
        """Record out `[N, V]`, the logits of all classes for hidden states x `[N, D]`."""
        segment, normed = self._find_segment(graph), pool.take(x.shape)
        rms_norm(graph, x, self.norm.weight, normed, eps=self.eps)
        for number, chunk in enumerate(self.chunks):
            self._begin_chunk(graph, segment, "forward", number)
            for window in chunk.split_rows(graph.binding_limit):
                _multiply_window(graph, normed, window, out, column=window.first)
        pool.give_back(normed)

    def _find_segment(self, graph: Graph) -> str:
        """Return the segment in which a recording of the head begins; empty if none is needed."""
        return graph.segments[-1] if self.streams else ""

    def _begin_chunk(
        self, graph: Graph, segment: str, direction: Literal["forward", "backward"], number: int
    ) -> None:
        if self.streams:
            graph.begin_segment(f"{segment}.{direction}.{number}")


def _record_logits(graph: Graph, normed: Array, logits: Array, window: HeadRows) -> Array:
    """Record the logits `[N, count]` of a window, dense, over those of another."""
    part = Array(logits.buffer, (normed.shape[0], window.count), offset=logits.offset)
    _multiply_window(graph, normed, window, part, column=0)
    return part


def _multiply_window(
    graph: Graph, normed: Array, window: HeadRows, out: Array, *, column: int
) -> None:
    """Record the logits of a window as columns of out, from `column` on."""
    gemm(
        graph,
        normed,
        window.weight,
        out,
        trans_b=True,
        m=normed.shape[0],
        n=window.count,
        k=normed.shape[1],
        ldc=out.shape[1],
        offsets=(0, 0, column),
    )


def _window_backward(
    graph: Graph,
    normed: Array,
    dlogits: Array,
    dnormed: Array,
    window: HeadRows,
    *,
    accumulate: bool,
) -> None:
    """Record dnormed `[N, D]` (+)= dlogits W of a window, and its gradient `+=`."""
    rows, width, classes = normed.shape[0], normed.shape[1], window.count
    gemm(
        graph,
        dlogits,
        window.weight,
        dnormed,
        m=rows,
        n=width,
        k=classes,
        accumulate=accumulate,
    )
    if window.gradient is not None:
        gemm(
            graph,
            dlogits,
            normed,
            window.gradient,
            trans_a=True,
            m=classes,
            n=width,
            k=rows,
            accumulate=True,
        )


@dataclass(frozen=True)
class _Objective:
    """The loss of a chunk: cross-entropy against classes and, if there is one, a teacher."""

    targets: Targets
    hard: Array
    """The state of the classes' cross-entropy, f32 `[N, 4]`."""
    soft: Array | None
    """The teacher's."""

    @classmethod
    def start(cls, graph: Graph, pool: MemoryPool, targets: Targets) -> _Objective:
        size = (targets.rows.size, 4)
        made = cls(targets, pool.take(size), pool.take(size) if targets.teacher else None)
        for state in made.states:
            cross_entropy_start(graph, state)
        return made

    @property
    def states(self) -> list[Array]:
        """The existing ones."""
        return [self.hard] if self.soft is None else [self.hard, self.soft]

    def add_window(self, graph: Graph, logits: Array, first: int) -> None:
        """Record the addition of the logits of the classes from `first` on."""
        targets, teacher = self.targets, self.targets.teacher
        cross_entropy_window(graph, logits, self.hard, targets.classes, targets.counts, first=first)
        if teacher and self.soft:
            cross_entropy_window(
                graph,
                logits,
                self.soft,
                teacher.classes,
                teacher.weights,
                first=first,
                temperature=teacher.temperature,
            )

    def loss(self, graph: Graph, sums: LossSums) -> None:
        """Record the sums over rows, after all windows."""
        cross_entropy_loss(graph, self.hard, self.targets.counts, sums.loss)
        if self.targets.teacher and self.soft:
            cross_entropy_loss(graph, self.soft, self.targets.teacher.weights, sums.taught)

    def record_gradient(self, graph: Graph, logits: Array, first: int) -> None:
        """Record the logits of a window becoming their gradient, after all windows."""
        targets = self.targets
        if targets.teacher and self.soft:
            distillation_gradient(
                graph,
                logits,
                self.hard,
                self.soft,
                targets.classes,
                targets.counts,
                targets.teacher,
                first=first,
            )
        else:
            cross_entropy_gradient(
                graph, logits, self.hard, targets.classes, targets.counts, first=first
            )
