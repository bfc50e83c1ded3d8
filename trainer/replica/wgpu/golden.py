"""A small decoder layer, the embedding and the losses in NumPy, fp64.

A device must compute the same before it may join.

It follows the definitions, not the kernels: no windows, no tiles, no backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer: grouped keys, and heads wider than hidden / heads.

    Multiples of 8, as in real models, so that the same code runs.
    """

    samples: int = 2
    length: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 64
    inner: int = 96
    rank: int = 4
    eps: float = 1e-6
    lora_scale: float = 2.0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of every linear."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (queries, self.hidden),
            "k": (keys, self.hidden),
            "v": (keys, self.hidden),
            "o": (self.hidden, queries),
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def norms(self) -> dict[str, int]:
        """Width of every norm."""
        return {
            "input_norm": self.hidden,
            "post_norm": self.hidden,
            "q_norm": self.head_dim,
            "k_norm": self.head_dim,
        }


def draw_values(sizes: Sizes) -> dict[str, NDArray[np.float32]]:
    """Return input `x` `[samples * length, hidden]`, weights and adapters, always the same.

    Linears are named `q`, with `q.a` and `q.b`; the queries have a bias, `q.bias`.
    """
    rng = np.random.default_rng(0)

    def draw_normal(*shape: int) -> NDArray[np.float32]:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return values.astype(np.float32)

    values = {"x": draw_normal(sizes.samples * sizes.length, sizes.hidden) * np.float32(8)}
    for name, (out, inner) in sizes.linears.items():
        values[name] = draw_normal(out, inner)
        values[f"{name}.a"] = draw_normal(sizes.rank, inner)
        values[f"{name}.b"] = draw_normal(out, sizes.rank)
    values["q.bias"] = draw_normal(sizes.linears["q"][0])
    for name, width in sizes.norms.items():
        values[name] = 1 + draw_normal(width)
    return values


def compute_layer_output(
    values: Mapping[str, Values], rope: tuple[Values, Values], sizes: Sizes
) -> Values:
    """Return the layer's output `[samples * length, hidden]`.

    Args:
        values: what `draw` returned, in fp64.
        rope: cosines and sines `[length, head_dim / 2]`.
        sizes: of the layer.
    """

    def linear(name: str, x: Values) -> Values:
        low = x @ values[f"{name}.a"].T
        y = x @ values[name].T + sizes.lora_scale * (low @ values[f"{name}.b"].T)
        return y + values.get(f"{name}.bias", 0.0)

    def norm(name: str, x: Values) -> Values:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + sizes.eps)
        return x / scale * values[name]

    def reshape_heads(x: Values) -> Values:
        return x.reshape(sizes.samples, sizes.length, -1, sizes.head_dim).swapaxes(1, 2)

    def rotate_heads(x: Values) -> Values:
        first, second = np.split(x, 2, axis=-1)
        cosines, sines = rope
        pairs = [first * cosines - second * sines, second * cosines + first * sines]
        return np.concatenate(pairs, axis=-1)

    x = values["x"]
    normed = norm("input_norm", x)
    group = sizes.heads // sizes.kv_heads
    queries = rotate_heads(norm("q_norm", reshape_heads(linear("q", normed))))
    keys = rotate_heads(norm("k_norm", reshape_heads(linear("k", normed)))).repeat(group, axis=1)
    scores = queries @ keys.swapaxes(2, 3) / np.sqrt(sizes.head_dim)
    future = np.triu(np.ones((sizes.length, sizes.length), bool), 1)
    weights = np.exp(np.where(future, -np.inf, scores))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = weights @ reshape_heads(linear("v", normed)).repeat(group, axis=1)
    middle = x + linear("o", attended.swapaxes(1, 2).reshape(len(x), -1))

    normed = norm("post_norm", middle)
    gate = linear("gate", normed)
    return middle + linear("down", gate / (1 + np.exp(-gate)) * linear("up", normed))


@dataclass(frozen=True)
class LossFixture:
    """Tokens, with labels and a teacher's predictions for some of them; some tokens repeat."""

    ids: NDArray[np.uint32]
    """`[M]`"""
    rows: NDArray[np.uint32]
    """`[N]`, the rows with targets."""
    labels: NDArray[np.uint32]
    """`[N, 1]`"""
    classes: NDArray[np.uint32]
    """`[N, K]`"""
    weights: NDArray[np.float32]
    """`[N, K]`"""
    shares: NDArray[np.float32]
    """`[2]`, of the cross-entropy with the labels and with the teacher."""
    temperature: float


def draw_fixture(sizes: Sizes) -> tuple[LossFixture, dict[str, NDArray[np.float32]]]:
    """Return the lesson, and the weights `table` `[V, hidden]` and `norm` `[hidden]`."""
    rng = np.random.default_rng(3)
    vocabulary, count, entries = 100, 8, 4
    classes = [rng.permutation(vocabulary)[:entries] for _ in range(count)]
    classes[0][1] = label = 7  # a teacher may predict the label
    fixture = LossFixture(
        ids=rng.integers(0, 10, 2 * count).astype(np.uint32),
        rows=np.arange(0, 2 * count, 2, dtype=np.uint32),
        labels=np.array([[label], *rng.integers(0, vocabulary, (count - 1, 1))], np.uint32),
        classes=np.array(classes, np.uint32),
        weights=rng.dirichlet(np.ones(entries), count).astype(np.float32),
        shares=np.array([0.5, 2.0], np.float32),
        temperature=2.0,
    )
    table = rng.standard_normal((vocabulary, sizes.hidden)) / 4
    norm = 1 + rng.standard_normal(sizes.hidden) / 4
    return fixture, {"table": table.astype(np.float32), "norm": norm.astype(np.float32)}


def compute_logit_gradients(rows: int, classes: int) -> NDArray[np.float32]:
    """Return what the cross-entropy gives for logits: softmax less one at each row's label.

    With the classes of a real vocabulary a row is one number near -1 among tiny ones: the product
    with the output matrix is then accurate only if partial sums are (`gemm.parts.loop`).
    """
    rng = np.random.default_rng(5)
    likely = np.exp(2 * rng.standard_normal((rows, classes)))
    gradients = likely / likely.sum(axis=1, keepdims=True)
    gradients[np.arange(rows), rng.integers(0, classes // 8, rows)] -= 1
    return gradients.astype(np.float32)


def compute_loss_sums(
    values: Mapping[str, Values], fixture: LossFixture, sizes: Sizes
) -> tuple[float, float]:
    """Return the cross-entropy with the labels and with the teacher, each summed over rows.

    The table is the embedding and the output matrix, with only the norm between them.
    """
    x = values["table"][fixture.ids[fixture.rows]]
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + sizes.eps)
    logits = x / scale * values["norm"] @ values["table"].T

    def cross_entropy(z: Values, classes: NDArray[np.uint32], weights: Values) -> float:
        total = np.log(np.exp(z).sum(axis=-1, keepdims=True))
        return float((weights * (total - np.take_along_axis(z, classes, axis=-1))).sum())

    ones = np.ones(fixture.labels.shape)
    taught = cross_entropy(
        logits / fixture.temperature, fixture.classes, fixture.weights.astype(np.float64)
    )
    return cross_entropy(logits, fixture.labels, ones), taught
