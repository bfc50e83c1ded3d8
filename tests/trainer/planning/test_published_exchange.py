"""Published figures of compression and offloading; a test says what a figure leaves out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.exchange.protocol.compression.powersgd import PowerSGD
from trainer.exchange.protocol.compression.topk import TopK
from trainer.planning.memory import plan_memory_by_part
from trainer.planning.shapes import NAMED
from trainer.planning.strategy import MIXED, Strategy, TrainingSetup

GIB, MIB = 2**30, 2**20


def resnet18() -> list[tuple[int, ...]]:
    """Return the tensors of ResNet18 for CIFAR-10, kernels as matrices `[out, in k k]`."""
    matrices, vectors, last = [(64, 27)], [64], 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            matrices += [(width, last * 9), (width, width * 9)]
            vectors += [width, width]
            if last != width:
                matrices.append((width, last))
                vectors.append(width)
            last = width
    return [*matrices, (10, 512), *((2 * size,) for size in vectors), (10,)]


@pytest.mark.parametrize(("rank", "published"), [(1, 243), (2, 136), (4, 72)])
def test_powersgd_of_resnet18(rank: int, published: int) -> None:
    """PowerSGD, arXiv 1905.13727, the table of ResNet18's parameters: compression by rank.

    Values are equally wide on both sides; vectors travel whole and are counted.
    """
    shapes = resnet18()
    elements = sum(math.prod(shape) for shape in shapes)
    assert 4 * elements / MIB == pytest.approx(43, rel=0.01)  # the same table's 43 MB
    sent = PowerSGD(rank, shapes).nbytes(elements) / 2
    assert elements / sent == pytest.approx(published, rel=0.002)


def test_top_k_of_gaussian_values() -> None:
    """A tenth of normal values keeps a cosine of 0.66: `sqrt(2 (t phi(t) + Q(t)))`, t = 1.645.

    Published as "3 times fewer bytes" beside fp16: 2 bytes against 6 for value and index of each
    tenth value are 3.3 times; beside fp32 5 times, not the 10 of counting values alone.
    """
    values = np.random.default_rng(0).standard_normal(1_000_000, dtype=np.float32)
    codec = TopK(0.1, [(values.size,)])
    kept = np.empty_like(values)
    codec.decode(codec.encode(0, values), kept)
    cosine = float(kept @ values) / float(np.linalg.norm(kept) * np.linalg.norm(values))
    limit = 1.6448536
    density = math.exp(-limit * limit / 2) / math.sqrt(2 * math.pi)
    analytic = math.sqrt(2 * (limit * density + 0.05))
    assert analytic == pytest.approx(0.6628, abs=1e-4)
    assert cosine == pytest.approx(analytic, rel=0.002)
    assert cosine == pytest.approx(0.66, rel=0.01)
    assert pytest.approx((3.33, 5), rel=0.01) == (2 / (0.1 * 6), 4 / (0.1 * 8))


def test_deepspeed_estimator_of_an_offloaded_model() -> None:
    """DeepSpeed, issue 4527: ZeRO-3 of 6805M parameters on 4 GPUs, all states in main memory.

    The estimator says 0.49 GiB, the largest layer's weights at 4 bytes: the table of 32,000 rows.
    Measured were 14,678 to 21,272 MiB, 29 to 43 times that, for it leaves activations out. One row
    of 2048 tokens alone, all its activations kept, is in between.
    """
    shape = NAMED["7b"]
    estimated = 4 * shape.table_parameters
    assert estimated / GIB == pytest.approx(0.49, rel=0.01)
    assert (14_678 * MIB / estimated, 21_272 * MIB / estimated) == pytest.approx((29, 43), rel=0.02)
    training = TrainingSetup(method="full", precision=MIXED, rows=1, length=2048)
    size = plan_memory_by_part(shape, training, Strategy(world=4, data="fsdp")).bytes()
    beside = size["activations"] + size["logits"] + size["buffers"]
    assert 14_678 * MIB < beside < 21_272 * MIB
