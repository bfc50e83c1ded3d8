"""Token embedding: against NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import embedding
from trainer.replica.wgpu.kernels.embedding import sort_tokens
from trainer.replica.wgpu.kernels.pool import SKIPPED


def tokens(count: int, vocabulary: int) -> np.ndarray:
    """Return ids in which some are common, as in a text; the first and last are there."""
    ids = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.uint32)
    ids[::3] = 5 % vocabulary
    ids[[0, -1]] = vocabulary - 1, 0
    return ids


def embedding_gradient(ids: np.ndarray, dy: np.ndarray, dtable: np.ndarray) -> np.ndarray:
    weight = leaf(dtable)
    y = F.embedding(torch.tensor(ids.astype(np.int64)), weight)
    return dtable + gradients(y, dy, weight)[0].numpy()


def test_sorted_tokens_name_every_row_once() -> None:
    unique, starts, order = sort_tokens(np.array([7, 2, 7, 7, 0], np.uint32))
    assert unique.tolist() == [0, 2, 7, SKIPPED, SKIPPED]
    assert starts.tolist() == [0, 1, 2, 5, 5, 5]
    assert order.tolist() == [4, 1, 0, 2, 3]
    assert {part.dtype for part in (unique, starts, order)} == {np.dtype(np.uint32)}


@pytest.mark.parametrize(("count", "vocabulary", "width"), [(1, 1, 1), (9, 11, 64), (30, 7, 129)])
def test_rows_and_gradient_are_torchs(
    device: Device, count: int, vocabulary: int, width: int
) -> None:
    ids, table = tokens(count, vocabulary), draw(vocabulary, width)
    (out,) = run(device, embedding.embed_tokens, [table, ids], [np.zeros((count, width))])
    np.testing.assert_array_equal(out, table[ids])

    dy = draw(count, width, number=1)
    (dtable,) = run(device, embedding.embedding_gradient, [dy, *sort_tokens(ids)], [table])
    agree(dtable, embedding_gradient(ids, dy, table))


@pytest.mark.parametrize("width", [1, 3, 64])
def test_bf16_tables_give_their_exact_values(device: Device, width: int) -> None:
    table = torch.tensor(draw(7, width)).bfloat16()
    words = np.zeros(-(-table.numel() // 2), np.uint32)
    words.view(np.uint16)[: table.numel()] = table.view(torch.uint16).numpy().reshape(-1)
    there = device.create_array((7, width), "bf16")
    device.write(there, words)
    ids = tokens(9, 7)
    (out,) = run(device, embedding.embed_tokens, [there, ids], [np.zeros((9, width))])
    np.testing.assert_array_equal(out, table.float().numpy()[ids])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_tables_beyond_a_kernel_argument_are_bound_in_windows(narrow: Device, kind: str) -> None:
    ids, values = tokens(50, 1001), torch.tensor(draw(1001, 70)).bfloat16()
    table: np.ndarray | Array = values.float().numpy()
    if kind == "bf16":
        table = narrow.create_array(tuple(values.shape), "bf16")
        narrow.write(table, values.view(torch.uint16).numpy())
    (out,) = run(narrow, embedding.embed_tokens, [table, ids], [np.zeros((50, 70))])
    np.testing.assert_array_equal(out, values.float().numpy()[ids])


def test_gradients_beyond_a_kernel_argument_are_bound_in_windows(narrow: Device) -> None:
    ids, before, dy = tokens(50, 1001), draw(1001, 70), draw(50, 70)
    (dtable,) = run(narrow, embedding.embedding_gradient, [dy, *sort_tokens(ids)], [before])
    agree(dtable, embedding_gradient(ids, dy, before))
