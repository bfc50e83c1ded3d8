"""Attention against torch's, in windows of heads and of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import relative
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layers import attention
from trainer.replica.wgpu.layers.attention import Attention

SHAPES = [
    Attention(batch=2, num_heads=4, num_kv_heads=2, length=16, head_dim=64),
    Attention(batch=1, num_heads=3, num_kv_heads=1, length=23, head_dim=96),
    Attention(batch=3, num_heads=2, num_kv_heads=2, length=1, head_dim=80),
    Attention(batch=1, num_heads=8, num_kv_heads=2, length=5, head_dim=256),
    Attention(batch=1, num_heads=4, num_kv_heads=2, length=100, head_dim=32),
]


def computed(
    device: Device, shape: Attention, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return output and gradients; `arrays` are queries, keys, values and the output's gradient."""
    pool, graph = MemoryPool(device), Graph(device)
    given: dict[str, Array] = {}
    for name, values in arrays.items():
        given[name] = device.create_array(values.shape)
        device.write(given[name], values)
    made = {
        name: device.create_array(arrays[source].shape)
        for name, source in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
    }
    q, k, v = given["q"], given["k"], given["v"]
    shape.forward(graph, pool, q, k, v, made["out"])
    shape.backward(graph, pool, q, k, v, given["dout"], made["dq"], made["dk"], made["dv"])
    graph.run()
    return {name: device.read(array) for name, array in made.items()}


def drawn(shape: Attention) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    queries = (shape.batch, shape.num_heads, shape.length, shape.head_dim)
    keys = (shape.batch, shape.num_kv_heads, shape.length, shape.head_dim)
    return {
        name: generator.standard_normal(size).astype(np.float32)
        for name, size in (("q", queries), ("k", keys), ("v", keys), ("dout", queries))
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_torch(device: Device, shape: Attention) -> None:
    arrays = drawn(shape)
    mine = computed(device, shape, arrays)
    q, k, v = (torch.tensor(arrays[name], dtype=torch.float64) for name in "qkv")
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(torch.tensor(arrays["dout"], dtype=torch.float64))
    for name, tensor in (("out", out.detach()), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        assert tensor is not None
        largest = max(1.0, float(tensor.abs().max()))  # dq and dk of one position are zero
        assert np.abs(mine[name] - tensor.numpy()).max() < 1e-6 * largest, name


@pytest.mark.parametrize(
    ("size", "count"),
    [
        pytest.param(4 * 23 * 23 * 3, 2, id="a head at a time"),
        pytest.param(4 * 23 * 10, 14, id="ten rows at a time"),
        pytest.param(4 * 23, 138, id="a row at a time"),
    ],
)
def test_windows_of_scores_change_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch, size: int, count: int
) -> None:
    shape = Attention(batch=2, num_heads=3, num_kv_heads=1, length=23, head_dim=16)
    arrays = drawn(shape)
    whole = computed(device, shape, arrays)
    monkeypatch.setattr(attention, "SCORE_BYTES", size)
    assert len(list(shape.iter_windows(size))) == count
    for name, values in computed(device, shape, arrays).items():
        assert relative(values, whole[name]) < 1e-6, name
