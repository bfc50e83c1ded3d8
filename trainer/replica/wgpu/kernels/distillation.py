"""The gradient of a distillation: a label and a teacher, in one pass over the logits.

With a label c, a teacher's entries (class c_k, weight w_k) at temperature T, and z = logits / T,

    loss = a_0 CE + a_1 KL
    CE = log(sum_j exp(logits_j)) - logits[c]
    KL = sum_k w_k (log(sum_j exp(z_j)) - z[c_k]) - H
    d loss / d logits = a_0 (softmax(logits) - one_hot(c)) + a_1 ((sum_k w_k) softmax(z) - w) / T

where a_0 = 1 - alpha, a_1 = alpha T^2 (Hinton et al., arXiv 1503.02531, section 2) and H is the
teacher's entropy, which has no gradient. Each sum is a `cross_entropy` with its own state, computed
over the same windows of logits; they cannot share one if T is not 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source


@dataclass(frozen=True)
class TeacherPredictions:
    """A teacher's predictions of N rows; all on the device."""

    classes: Array
    """u32 `[N, K]`; a row has a class once, but an entry of weight 0 may have any."""
    weights: Array
    """f32 `[N, K]`; all zero for a row without a teacher."""
    shares: Array
    """f32 `[2]`: a_0 and a_1."""
    temperature: float


def distillation_gradient(
    graph: Graph,
    logits: Array,
    hard: Array,
    soft: Array,
    labels: Array,
    counts: Array,
    teacher: TeacherPredictions,
    *,
    first: int = 0,
) -> None:
    """Record logits `[N, W]` of classes from `first` on = their gradient.

    hard and soft `[N, 4]` are the states of both cross-entropies, which cover all classes.
    labels u32 `[N, 1]` with counts f32 `[N, 1]`, 1 for a row that counts, else 0.
    """
    rows, width = logits.shape
    entries = teacher.classes.shape[1]
    assert hard.shape == soft.shape == (rows, 4), (hard.shape, soft.shape)
    assert labels.shape == counts.shape == (rows, 1), (labels.shape, counts.shape)
    assert teacher.classes.shape == teacher.weights.shape == (rows, entries), teacher
    graph.add(
        "distillation_gradient",
        read_kernel_source("distillation_gradient"),
        [logits, hard, soft, labels, counts, teacher.classes, teacher.weights, teacher.shares],
        {
            "rows": rows,
            "width": width,
            "first": first,
            "entries": entries,
            "sharpness": 1 / teacher.temperature,
        },
        spread_workgroups(rows),
    )
