"""From the last hidden states to the loss and back: pooled classifier or language model.

Only rows with targets are computed: the last token of each sample, or the positions with a target.
They come in chunks of fixed size, so that one recording serves any number of them, and the
vocabulary in windows, so that a large one needs no `[rows, V]` array.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Head:
    """Final norm and output matrix `[V, D]`, which may be the embedding."""

    norm: Norm
    weight: Array
    gradient: Array | None
    eps: float

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
        count, width = targets.rows.size, x.shape[1]
        picked, normed = pool.take((count, width)), pool.take((count, width))
        gather_rows(graph, x, targets.rows, picked)
        rms_norm(graph, picked, self.norm.weight, normed, eps=self.eps)
        mark_non_finite(graph, normed, sums.flag)

        objective = _Objective.start(graph, pool, targets)
        spans = list(iterate_windows(self.weight, self._window_bytes(graph, count)))
        logits = pool.take((count, spans[0][1]), purpose="logits")
        for start, stop in spans:
            part = self._logits(graph, normed, logits, start, stop)
            objective.add_window(graph, part, start)
        if predictions is not None:
            assert len(spans) == 1, "predictions need all classes in one window"
            argmax_rows(graph, logits, predictions)
        objective.loss(graph, sums)
        if dx is not None:
            dnormed = pool.take((count, width))
            for start, stop in spans:
                part = Array(logits.buffer, (count, stop - start), offset=logits.offset)
                if len(spans) > 1:  # a single window still has its logits
                    part = self._logits(graph, normed, logits, start, stop)
                objective.record_gradient(graph, part, start)
                self._window_backward(graph, normed, part, dnormed, start, stop)
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
        normed = pool.take(x.shape)
        rms_norm(graph, x, self.norm.weight, normed, eps=self.eps)
        for start, stop in iterate_windows(self.weight, graph.binding_limit):
            gemm(
                graph,
                normed,
                self.weight.slice_rows(start, stop),
                out,
                trans_b=True,
                m=x.shape[0],
                n=stop - start,
                k=x.shape[1],
                ldc=out.shape[1],
                offsets=(0, 0, start),
            )
        pool.give_back(normed)

    def _window_bytes(self, graph: Graph, count: int) -> int:
        """Return the bytes of a window of weights that exceeds neither a binding nor the logits."""
        rows, columns = self.weight.shape
        return logit_window_bytes(rows, columns, self.weight.kind, count, graph.binding_limit)

    def _logits(self, graph: Graph, normed: Array, logits: Array, start: int, stop: int) -> Array:
        """Record the logits `[N, stop - start]` of a window, dense, over those of another."""
        part = Array(logits.buffer, (normed.shape[0], stop - start), offset=logits.offset)
        gemm(
            graph,
            normed,
            self.weight.slice_rows(start, stop),
            part,
            trans_b=True,
            m=normed.shape[0],
            n=stop - start,
            k=normed.shape[1],
        )
        return part

    def _window_backward(
        self, graph: Graph, normed: Array, dlogits: Array, dnormed: Array, start: int, stop: int
    ) -> None:
        rows, width, classes = normed.shape[0], normed.shape[1], stop - start
        gemm(
            graph,
            dlogits,
            self.weight.slice_rows(start, stop),
            dnormed,
            m=rows,
            n=width,
            k=classes,
            accumulate=start > 0,
        )
        if self.gradient is not None:
            gemm(
                graph,
                dlogits,
                normed,
                self.gradient.slice_rows(start, stop),
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
