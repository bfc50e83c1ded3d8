"""A device that computes rightly passes; one wrong sign or number anywhere is caught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from trainer.replica.rope import compute_rope_tables
from trainer.replica.wgpu import golden
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError, LostError
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.selftest import verify_device


class Miscompiling(Device):
    """A device whose driver turns one piece of code into another."""

    def __init__(self, adapter: Adapter, written: str, compiled: str) -> None:
        super().__init__(adapter)
        self.written = written
        self.compiled = compiled
        self.hits = 0

    def create_pipeline(self, code: str, constants: Mapping[str, float] | None = None) -> Any:
        self.hits += code.count(self.written)
        return super().create_pipeline(code.replace(self.written, self.compiled), constants)


def test_a_right_device_passes_and_gets_its_memory_back(device: Device) -> None:
    verify_device(device)
    before = device.allocated
    verify_device(device)
    assert device.allocated == before


@pytest.mark.parametrize(
    ("written", "compiled", "wrong"),
    [
        ("0.7229568362236023", "0.7239568362236023", ""),  # of the 16 values of NF4
        ("inverseSqrt(", "inverseSqrt(-", "layer"),  # NaN, which is never larger than a limit
        ("g * s * (1.0 - s)", "g * s * (1.0 + s)", "gradient"),
        ("- x[base + i] * along", "+ x[base + i] * along", "gradient"),
        ("(gradient[base + i] - along)", "(gradient[base + i] + along)", "gradient"),
        ("before.z + score", "before.z - score", "the loss of"),
        ("-= sharpness * weights[k]", "+= sharpness * weights[k]", "the loss's gradient"),
        ("-= label_factor", "+= label_factor", "the loss's gradient"),
        ("dy[order[i]", "dy[order[first]", "the loss's gradient of table"),
        ("select(-other, other, i < half)", "select(other, -other, i < half)", "gradient"),
    ],
)
def test_one_wrong_sign_or_number_is_caught(
    vulkan: Adapter, written: str, compiled: str, wrong: str
) -> None:
    broken = Miscompiling(vulkan, written, compiled)
    with pytest.raises(DeviceError, match=f"failed the self-test: .*{wrong}.* is off by"):
        verify_device(broken)
    assert broken.hits


def test_one_sum_over_a_real_vocabulary_is_caught(
    vulkan: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.replica.wgpu.kernels.gemm.record.LONG", 1 << 30)
    with pytest.raises(
        DeviceError, match=r"failed the self-test: .* over 151,936 classes .* is off"
    ):
        verify_device(Device(vulkan))


def test_a_lost_device_is_not_called_wrong(vulkan: Adapter) -> None:
    device = Device(vulkan)
    device.handle.destroy()
    with pytest.raises(LostError):
        verify_device(device)


def test_the_golden_layer_is_that_of_torch() -> None:
    sizes = golden.Sizes()
    rope = compute_rope_tables({}, sizes.head_dim, sizes.length, "here")
    values = {name: value.astype(np.float64) for name, value in golden.draw_values(sizes).items()}
    tables = rope[0].astype(np.float64), rope[1].astype(np.float64)
    t = {name: torch.from_numpy(value) for name, value in values.items()}
    cosines, sines = (torch.from_numpy(table).repeat(1, 2) for table in tables)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, t[name], t.get(f"{name}.bias"))
        return y + sizes.lora_scale * x @ t[f"{name}.a"].T @ t[f"{name}.b"].T

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], t[name], sizes.eps)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(sizes.samples, sizes.length, -1, sizes.head_dim).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-second, first], dim=-1) * sines

    x = norm("input_norm", t["x"])
    attended = functional.scaled_dot_product_attention(
        turned(norm("q_norm", heads(linear("q", x)))),
        turned(norm("k_norm", heads(linear("k", x)))),
        heads(linear("v", x)),
        is_causal=True,
        enable_gqa=True,
    )
    middle = t["x"] + linear("o", attended.transpose(1, 2).reshape(len(x), -1))
    x = norm("post_norm", middle)
    expected = middle + linear("down", functional.silu(linear("gate", x)) * linear("up", x))
    found = golden.compute_layer_output(values, tables, sizes)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_the_golden_losses_are_those_of_torch() -> None:
    sizes = golden.Sizes()
    lesson, drawn = golden.draw_fixture(sizes)
    values = {name: value.astype(np.float64) for name, value in drawn.items()}
    table, norm = (torch.from_numpy(values[name]) for name in ("table", "norm"))
    x = table[lesson.ids[lesson.rows].astype(np.int64)]
    logits = functional.rms_norm(x, x.shape[-1:], norm, sizes.eps) @ table.T
    labels = torch.from_numpy(lesson.labels[:, 0].astype(np.int64))
    dense = torch.zeros_like(logits).scatter_(
        1,
        torch.from_numpy(lesson.classes.astype(np.int64)),
        torch.from_numpy(lesson.weights.astype(np.float64)),
    )
    expected = (
        functional.cross_entropy(logits, labels, reduction="sum"),
        functional.cross_entropy(logits / lesson.temperature, dense, reduction="sum"),
    )
    assert golden.compute_loss_sums(values, lesson, sizes) == pytest.approx(
        [float(e) for e in expected]
    )
    assert len(set(lesson.ids.tolist())) < lesson.ids.size
