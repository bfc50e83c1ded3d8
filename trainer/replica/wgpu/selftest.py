"""Test a device: products, a decoder layer, embedding and losses, against NumPy.

A driver that miscompiles a kernel would poison the whole run, so a device that fails here never
joins (F-DP-004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import Kind
from trainer.replica.rope import compute_rope_tables
from trainer.replica.weights.floats import from_bf16, to_bf16
from trainer.replica.weights.nf4 import dequantize, quantize
from trainer.replica.wgpu import golden
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.distillation import TeacherPredictions
from trainer.replica.wgpu.kernels.embedding import embed_tokens, embedding_gradient, sort_tokens
from trainer.replica.wgpu.kernels.gemm.choice import choose_variant, tuned_variants
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.gemm.variants import Product, Variant
from trainer.replica.wgpu.layers import decoder_layer
from trainer.replica.wgpu.layers.attention import Attention
from trainer.replica.wgpu.layers.decoder_layer import Activations, Layer, Norm, Shape
from trainer.replica.wgpu.layers.head import Head, LossSums, Targets, split_matrix
from trainer.replica.wgpu.layers.linear import Linear, Lora, Trainable

TOLERANCE = 1e-5
"""Relative to the largest value, or for a derivative to the norms' product; correct devices are
below 1e-6."""

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("q", "k", "v", "o"), "nf4"),
    **dict.fromkeys(("gate", "up"), "bf16"),
}
_PRODUCTS: tuple[tuple[Kind, str], ...] = (
    *(("f32", form) for form in ("NN", "NT", "TN")),
    *(("bf16", form) for form in ("NN", "NT")),
    *(("nf4", form) for form in ("NN", "NT")),
)
_SIZES = ((20, 24, 48), (20, 24, 256), (1, 24, 256))
"""m, n, k of products with different defaults: all small, larger k, one row."""
_VOCABULARIES = ((16, 24, 49_152), (4, 24, 151_936))
"""The same of the products that give a head's hidden states their gradient: SmolLM2, Qwen3."""
_TRAINED = "down"  # a base weight that trains, as all do without an adapter


def verify_device(device: Device) -> None:
    """Test a device.

    Raises:
        DeviceError: names what is wrong and by how much; or the device fails.
    """
    pool = MemoryPool(device)
    try:
        errors = dict(
            itertools.chain(
                *(
                    part(device, pool)
                    for part in (_product_errors, _head_errors, _layer_errors, _loss_errors)
                )
            )
        )
    finally:
        pool.release()
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    if not errors[worst] <= TOLERANCE:
        raise DeviceError(
            f"{device.adapter.name} failed the self-test: {worst} is off by {errors[worst]:.0e},"
            f" {TOLERANCE:.0e} is allowed"
        )


def _product_errors(device: Device, pool: MemoryPool) -> Iterator[tuple[str, float]]:
    """Yield the error of every form of product of a model, in every variant that it may take."""
    rng = np.random.default_rng(1)
    for (kind, form), (m, n, k) in itertools.product(_PRODUCTS, _SIZES):
        trans_a, trans_b = form[0] == "T", form[1] == "T"
        shapes = ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (m, n))
        a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        wide_a, wide_b = _widen_values(a), _widen_values(_round_to_kind(b, kind))
        product = (wide_a.T if trans_a else wide_a) @ (wide_b.T if trans_b else wide_b)
        asked = Product(trans_a, trans_b, kind, m, n, k)
        for variant, found in _run_variants(device, pool, asked, a, b, c):
            error = _relative_distance(found, c + 0.5 * product)
            yield f"a {form} product with {kind} ({variant.name})", error


def _head_errors(device: Device, pool: MemoryPool) -> Iterator[tuple[str, float]]:
    """Yield the errors of the products of logits' gradients with output matrices.

    Rows of a matrix have a common part, as those of trained ones: most of a sum cancels out.
    """
    rng = np.random.default_rng(6)
    for (m, n, k), kind in itertools.product(_VOCABULARIES, ("f32", "bf16")):
        a, c = golden.compute_logit_gradients(m, k), np.zeros((m, n), np.float32)
        b = (rng.standard_normal((k, n)) / 10 + 0.25).astype(np.float32)
        product = 0.5 * _widen_values(a) @ _widen_values(_round_to_kind(b, kind))
        for variant, found in _run_variants(
            device, pool, Product(False, False, kind, m, n, k), a, b, c
        ):
            error = _relative_distance(found, product)
            yield f"a product with {kind} over {k:,} classes ({variant.name})", error


def _run_variants(
    device: Device,
    pool: MemoryPool,
    product: Product,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
) -> Iterator[tuple[Variant, NDArray[np.float32]]]:
    """Yield each variant that a product may take, and c + a b / 2 by it."""
    left, right = _upload_weight(device, pool, a), _upload_weight(device, pool, b, product.kind_b)
    for variant in _find_variants(device, product):
        out, graph = _upload_weight(device, pool, c), Graph(device)
        gemm(
            graph,
            left,
            right,
            out,
            trans_a=product.trans_a,
            trans_b=product.trans_b,
            m=product.m,
            n=product.n,
            k=product.k,
            alpha=0.5,
            accumulate=True,
            variant=variant,
        )
        graph.run()
        yield variant, device.read(out)


def _find_variants(device: Device, product: Product) -> list[Variant]:
    """Return the variant for a product, and the tuned ones of products of its form."""
    form = f"{product.form} {product.kind_b} "
    tuned = [variant for key, variant in tuned_variants(device).items() if key.startswith(form)]
    return list(dict.fromkeys([choose_variant(device, product), *tuned]))


def _layer_errors(device: Device, pool: MemoryPool) -> Iterator[tuple[str, float]]:
    """Yield the errors of a layer's output and of its gradients.

    A gradient is correct if its product with a direction is the derivative along it, which NumPy
    computes by central differences of `sum(output * dy)`.
    """
    sizes = golden.Sizes()
    drawn = golden.draw_values(sizes)
    rope = compute_rope_tables({}, sizes.head_dim, sizes.length, "self-test")
    rng = np.random.default_rng(2)
    dy = rng.standard_normal(drawn["x"].shape)
    output, gradients = _run_layer(device, pool, sizes, drawn, rope, dy.astype(np.float32))

    values = {
        name: _widen_values(_round_to_kind(value, _KINDS.get(name, "f32")))
        for name, value in drawn.items()
    }
    tables = _widen_values(rope[0]), _widen_values(rope[1])
    yield (
        "a layer's output",
        _relative_distance(output, golden.compute_layer_output(values, tables, sizes)),
    )
    dy = _widen_values(dy.astype(np.float32))
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)

        def along(step: float, name: str = name, direction: golden.Values = direction) -> float:
            moved = values | {name: values[name] + step * direction}
            return float((golden.compute_layer_output(moved, tables, sizes) * dy).sum())

        yield f"a layer's gradient of {name}", _gradient_error(gradient, direction, along)


def _loss_errors(device: Device, pool: MemoryPool) -> Iterator[tuple[str, float]]:
    """Yield the errors around the layers: embedding, final norm and losses."""
    sizes = golden.Sizes()
    fixture, drawn = golden.draw_fixture(sizes)
    weights = {name: _upload_weight(device, pool, value) for name, value in drawn.items()}
    gradients = {
        name: _upload_weight(device, pool, np.zeros_like(value)) for name, value in drawn.items()
    }
    ids, rows, labels, classes = (
        _upload_words(device, pool, words)
        for words in (fixture.ids, fixture.rows, fixture.labels, fixture.classes)
    )
    teacher = TeacherPredictions(
        classes,
        _upload_weight(device, pool, fixture.weights),
        _upload_weight(device, pool, fixture.shares),
        fixture.temperature,
    )
    counts = _upload_weight(device, pool, np.ones(fixture.labels.shape, np.float32))
    loss, taught = (_upload_weight(device, pool, np.zeros(1, np.float32)) for _ in range(2))
    sums = LossSums(loss, taught, _upload_words(device, pool, np.zeros(1, np.uint32)))
    unique, starts, order = (
        _upload_words(device, pool, words) for words in sort_tokens(fixture.ids)
    )
    x = pool.take((fixture.ids.size, sizes.hidden))
    dx = _upload_weight(device, pool, np.zeros(x.shape, np.float32))
    table, dtable = weights["table"], gradients["table"]
    norm = Norm(weights["norm"], gradients["norm"])
    head = Head(norm, split_matrix(table, dtable), sizes.eps)
    graph = Graph(device)
    embed_tokens(graph, table, ids, x)
    head.loss(graph, pool, x, Targets(rows, labels, counts, teacher), sums, dx=dx)
    embedding_gradient(graph, dx, unique, starts, order, dtable)
    graph.run()

    values = {name: _widen_values(value) for name, value in drawn.items()}
    expected = golden.compute_loss_sums(values, fixture, sizes)
    for name, found, right in zip(("a label", "a teacher"), (loss, taught), expected, strict=True):
        yield f"the loss of {name}", _relative_distance(device.read(found), np.array([right]))
    rng = np.random.default_rng(4)
    for name, array in gradients.items():
        gradient = device.read(array).reshape(drawn[name].shape)
        direction = rng.standard_normal(gradient.shape)

        def along(step: float, name: str = name, direction: golden.Values = direction) -> float:
            moved = values | {name: values[name] + step * direction}
            return float(fixture.shares @ np.array(golden.compute_loss_sums(moved, fixture, sizes)))

        yield f"the loss's gradient of {name}", _gradient_error(gradient, direction, along)


def _run_layer(
    device: Device,
    pool: MemoryPool,
    sizes: golden.Sizes,
    drawn: Mapping[str, NDArray[np.float32]],
    rope: tuple[NDArray[np.float32], NDArray[np.float32]],
    dy: NDArray[np.float32],
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """Return output and gradients of the layer on the device; all that is not packed trains."""
    weights = {
        name: _upload_weight(device, pool, value, _KINDS.get(name, "f32"))
        for name, value in drawn.items()
    }
    gradients = {
        name: _upload_weight(device, pool, np.zeros_like(drawn[name]))
        for name in drawn
        if name not in sizes.linears or name == _TRAINED
    }
    gradients["x"] = _upload_weight(device, pool, dy)

    def make_adapter(name: str) -> Lora:
        a, b = f"{name}.a", f"{name}.b"
        trained = Trainable(weights[b], gradients[b])
        return Lora(weights[a], gradients[a], trained, sizes.lora_scale)

    linears = {
        name: Linear(
            weights[name],
            gradients.get(name),
            weights.get(f"{name}.bias"),
            gradients.get(f"{name}.bias"),
            make_adapter(name),
        )
        for name in sizes.linears
    }
    norms = {name: Norm(weights[name], gradients[name]) for name in sizes.norms}
    attention = Attention(sizes.samples, sizes.heads, sizes.kv_heads, sizes.length, sizes.head_dim)
    tables = _upload_weight(device, pool, rope[0]), _upload_weight(device, pool, rope[1])
    shape = Shape(attention, sizes.hidden, sizes.inner, sizes.eps, tables)
    kept, output = Activations.take(pool, shape), pool.take(dy.shape)
    layer = Layer(
        **linears,
        rotates=True,
        input_norm=norms["input_norm"],
        post_norm=norms["post_norm"],
        q_norm=norms["q_norm"],
        k_norm=norms["k_norm"],
    )
    graph = Graph(device)
    decoder_layer.forward(graph, pool, layer, shape, kept, weights["x"], output)
    decoder_layer.backward(graph, pool, layer, shape, kept, weights["x"], gradients["x"])
    graph.run()
    return device.read(output), {name: device.read(array) for name, array in gradients.items()}


def _gradient_error(
    gradient: NDArray[np.float32], direction: golden.Values, along: Callable[[float], float]
) -> float:
    """Return the error of a gradient's product with a direction against the derivative."""
    found = float((gradient * direction).sum())
    scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
    step = 1e-4  # the derivative at 0 is off by the order of its square
    derivative = (along(step) - along(-step)) / (2 * step)
    return abs(found - derivative) / max(scale, 1e-30)


def _upload_weight(
    device: Device, pool: MemoryPool, values: NDArray[np.float32], kind: Kind = "f32"
) -> Array:
    """Return values on the device as a kind of weight."""
    array = pool.take(values.shape, kind)
    flat = values.reshape(-1)
    if kind == "f32":
        device.write(array, values)
        return array
    if kind == "nf4":
        codes, absmax = quantize(flat)
        assert array.scales is not None, "NF4 has scales"
        device.write(array.scales, absmax)
    else:
        codes = to_bf16(flat)
    words = np.zeros(array.nbytes // 4, np.uint32)
    words.view(np.uint8)[: codes.nbytes] = codes.view(np.uint8)
    device.write(array, words)
    return array


def _upload_words(device: Device, pool: MemoryPool, values: NDArray[np.uint32]) -> Array:
    array = pool.take(values.shape, "u32")
    device.write(array, values)
    return array


def _round_to_kind(values: NDArray[np.float32], kind: Kind) -> NDArray[np.float32]:
    """Return values rounded to a kind."""
    flat = values.reshape(-1)
    if kind == "bf16":
        flat = from_bf16(to_bf16(flat))
    elif kind == "nf4":
        flat = dequantize(*quantize(flat), flat.size)
    return flat.reshape(values.shape)


def _widen_values(values: NDArray[np.float32]) -> golden.Values:
    return values.astype(np.float64)


def _relative_distance(found: NDArray[np.float32], expected: golden.Values) -> float:
    """Return the largest difference, relative to the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
