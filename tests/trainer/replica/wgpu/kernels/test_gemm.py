"""Matrix products of every variant, layout and format against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import agree, draw, packed, put, run
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu import golden
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.gemm.variants import ALL, Product, Variant

TOLERANCE = 1e-4  # F-WGPU-001
SMALL = [
    Variant("direct", 4, 4, down=2, across=2),
    Variant("direct", 1, 4, across=4, splits=4),
    Variant("direct", 4, 8, across=2, splits=2),
    Variant("tiled", 4, 4, down=2, across=4, depth=8),
]
"""One of each way, quick to compile."""
ODD = [(1, 1, 1), (3, 5, 17), (17, 66, 3), (66, 1, 5), (1, 130, 17), (5, 17, 130), (130, 3, 1)]
EVEN = [(4, 8, 12), (20, 36, 28), (68, 40, 64)]


def stored(values: np.ndarray, trans: bool) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(-1, -2)) if trans else values


@pytest.mark.parametrize("form", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("variant", SMALL, ids=lambda variant: variant.name)
def test_every_way_and_layout(device: Device, variant: Variant, form: str) -> None:
    trans_a, trans_b = form[0] == "T", form[1] == "T"
    graph = Graph(device)
    expected: list[tuple[Array, np.ndarray]] = []
    for m, n, k in ODD + EVEN:
        a, b = draw(m, k), draw(k, n, number=1)
        c = device.create_array((m, n))
        gemm(
            graph,
            put(device, stored(a, trans_a)),
            put(device, stored(b, trans_b)),
            c,
            m=m,
            n=n,
            k=k,
            trans_a=trans_a,
            trans_b=trans_b,
            variant=variant,
        )
        expected.append((c, a.astype(np.float64) @ b.astype(np.float64)))
    graph.run()
    for c, product in expected:
        agree(device.read(c), product, TOLERANCE)


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_variants_that_devices_choose_from(device: Device, variant: Variant) -> None:
    a, b = draw(70, 64), draw(72, 64, number=1)
    settings = {"m": 70, "n": 72, "k": 64, "trans_b": True, "variant": variant}
    (c,) = run(device, gemm, [a, b], [np.zeros((70, 72), np.float32)], **settings)
    agree(c, a.astype(np.float64) @ b.T.astype(np.float64), TOLERANCE)


@pytest.mark.parametrize("classes", [49_152, 151_936])
@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_the_gradient_through_a_real_vocabulary(
    device: Device, variant: Variant, classes: int
) -> None:
    """Most of each sum cancels out; one fp32 sum is off by 1e-5 to 2e-4."""
    dlogits = golden.compute_logit_gradients(5, classes)
    weight, read = packed(device, draw(classes, 12) / 10 + np.float32(0.25), "bf16")
    sizes = {"m": 5, "n": 12, "k": classes, "variant": variant}
    (c,) = run(device, gemm, [dlogits, weight], [np.zeros((5, 12), np.float32)], **sizes)
    agree(c, dlogits.astype(np.float64) @ read.astype(np.float64), 4e-6)


@pytest.mark.parametrize("k", [4096, 4097, 4350, 4352, 9728])
@pytest.mark.parametrize("form", ["NN", "NT", "TN"])
@pytest.mark.parametrize("variant", SMALL, ids=lambda variant: variant.name)
def test_partial_sums_of_any_length(device: Device, variant: Variant, form: str, k: int) -> None:
    trans_a, trans_b = form[0] == "T", form[1] == "T"
    a, b = draw(3, k), draw(k, 8, number=1)
    stored_both = [stored(a, trans_a), stored(b, trans_b)]
    sizes = {"m": 3, "n": 8, "k": k, "trans_a": trans_a, "trans_b": trans_b}
    sizes["variant"] = variant
    (c,) = run(device, gemm, stored_both, [np.zeros((3, 8), np.float32)], **sizes)
    agree(c, a.astype(np.float64) @ b.astype(np.float64), 4e-6)


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
@pytest.mark.parametrize("variant", [SMALL[0], SMALL[3]], ids=lambda variant: variant.kind)
def test_packed_weights(device: Device, variant: Variant, kind: Kind) -> None:
    for out, inner in ((24, 64), (19, 37)):
        weight, rounded = packed(device, draw(out, inner), kind)
        wide = rounded.astype(np.float64)
        x, dy = draw(9, inner, number=1), draw(9, out, number=2)
        sizes = {"m": 9, "n": out, "k": inner, "trans_b": True}
        (y,) = run(
            device, gemm, [x, weight], [np.zeros((9, out), np.float32)], variant=variant, **sizes
        )
        agree(y, x @ wide.T, TOLERANCE)
        sizes = {"m": 9, "n": inner, "k": out}
        (dx,) = run(
            device, gemm, [dy, weight], [np.zeros((9, inner), np.float32)], variant=variant, **sizes
        )
        agree(dx, dy @ wide, TOLERANCE)


@pytest.mark.parametrize("kind", ["f32", "bf16", "nf4"])
@pytest.mark.parametrize("variant", [SMALL[0], SMALL[3]], ids=lambda variant: variant.kind)
def test_weights_are_decoded_exactly(device: Device, variant: Variant, kind: Kind) -> None:
    for width in (64, 33):
        weight, rounded = packed(device, draw(16, width), kind)
        identity = np.eye(16, dtype=np.float32)
        sizes = {"m": 16, "n": width, "k": 16}
        (copy,) = run(
            device,
            gemm,
            [identity, weight],
            [np.zeros((16, width), np.float32)],
            variant=variant,
            **sizes,
        )
        assert np.array_equal(copy, rounded)


@pytest.mark.parametrize("unit", [1, 4], ids=["odd", "even"])
@pytest.mark.parametrize("variant", SMALL, ids=lambda variant: variant.name)
def test_batches_with_gaps_offsets_and_pitches(device: Device, variant: Variant, unit: int) -> None:
    batch, m, n, k = 3, 5, 3 * unit, 4 * unit
    offsets = (unit, 2 * unit, 3 * unit)
    pitches = (k + unit, n + 2 * unit, n + unit)
    strides = (m * pitches[0] + unit, k * pitches[1] + 2 * unit, m * pitches[2] + 3 * unit)
    extents = ((m, k), (k, n), (m, n))

    def items(flat: np.ndarray, which: int) -> np.ndarray:
        (rows, columns), pitch = extents[which], pitches[which]
        return np.stack(
            [
                np.lib.stride_tricks.as_strided(
                    flat[offsets[which] + z * strides[which] :], (rows, columns), (4 * pitch, 4)
                )
                for z in range(batch)
            ]
        ).astype(np.float64)

    flats = [draw(offsets[i] + batch * strides[i], number=i) for i in range(3)]
    (got,) = run(
        device,
        gemm,
        flats[:2],
        flats[2:],
        m=m,
        n=n,
        k=k,
        batch=batch,
        strides=strides,
        lda=pitches[0],
        ldb=pitches[1],
        ldc=pitches[2],
        offsets=offsets,
        alpha=-0.5,
        accumulate=True,
        variant=variant,
    )
    a, b, c = (items(flat, which) for which, flat in enumerate(flats))
    agree(items(got, 2).astype(np.float32), c - 0.5 * (a @ b), TOLERANCE)
    changed = got != flats[2]
    written = np.zeros_like(changed)
    for z in range(batch):
        for row in range(m):
            start = offsets[2] + z * strides[2] + row * pitches[2]
            written[start : start + n] = True
    assert not changed[~written].any(), "what lies between the items was written"


def test_more_workgroups_than_one_row_of_the_grid_holds(device: Device) -> None:
    rows = 70_000
    a, b = draw(rows, 4), draw(4, 4, number=1)
    variant = Variant("direct", 1, 4, across=1)
    graph = Graph(device)
    c = device.create_array((rows, 4))
    gemm(graph, put(device, a), put(device, b), c, m=rows, n=4, k=4, variant=variant)
    assert graph.dispatches[0].grid[1] == 2
    graph.run()
    agree(device.read(c), a.astype(np.float64) @ b, TOLERANCE)


def test_a_number_that_is_none_spreads_to_its_row_alone(device: Device) -> None:
    a, b = draw(6, 10), draw(10, 6, number=1)
    a[2, 9] = np.nan
    (c,) = run(device, gemm, [a, b], [np.zeros((6, 6), np.float32)], m=6, n=6, k=10)
    assert np.array_equal(np.isnan(c).any(axis=1), np.arange(6) == 2)


def test_an_operand_that_is_too_short_is_refused() -> None:
    graph = Graph(None)
    a, b, c = (Array(None, (4, 4)) for _ in range(3))
    with pytest.raises(AssertionError, match=r"element 20 of \(4, 4\)"):
        gemm(graph, a, b, c, m=5, n=4, k=4)


def test_sizes_within_a_power_of_two_are_one_class() -> None:
    def key(m: int, n: int, k: int) -> str:
        return Product(False, True, "nf4", m, n, k).key

    assert key(300, 1024, 1000) == key(512, 1000, 513) == "NT nf4 512x1024x1024"
    assert key(256, 1024, 1024) != key(257, 1024, 1024)
