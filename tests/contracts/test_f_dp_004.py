"""F-DP-004: backend fallback CUDA -> wgpu -> CPU always ends in finite output, and says why.

`auto` falls back, and so does a process in the middle of a run. Else a request is had or refused.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from trainer.data.tokens import Encoded
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.replica import backend
from trainer.replica.backend import (
    OPENERS,
    BackendRequest,
    Opener,
    ReplicaChoice,
    UnusableError,
    choose_replica,
)
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.vulkan_adapter import list_adapters
from trainer.system.errors import InputError
from trainer.system.process.child import FALLBACK_VARIABLE

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from trainer.replica.base import Replica
    from trainer.system.backends import RequestedBackend

BATCH = [Encoded(np.array([5, 6, 7], np.int32), 1), Encoded(np.array([8], np.int32), 0)]


def trained_step(choice: ReplicaChoice, weights: np.ndarray) -> np.ndarray:
    choice.replica.write_trainable(weights)
    gradient = np.full(choice.replica.layout.size, np.nan, np.float32)
    blocks = choice.replica.layout.blocks

    def on_block(index: int, values: np.ndarray) -> None:
        gradient[blocks[index].start : blocks[index].stop] = values

    result = choice.replica.forward_backward(BATCH, on_block)
    assert np.isfinite(result.loss_sum)
    return gradient


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one that a supervisor has started again."""
    monkeypatch.setenv(FALLBACK_VARIABLE, "1")


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("wanted", ["auto", "cuda", "wgpu", "cpu"])
def test_every_request_in_a_run_ends_in_finite_output(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    wanted: RequestedBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    with caplog.at_level(logging.WARNING):
        choice = choose_replica(wanted, "", folder, config, layout, 1)
    assert np.isfinite(trained_step(choice, initial_weights(layout, folder, config))).all()
    if torch.cuda.is_available():
        return
    # Software stands in for a GPU only where wgpu was asked for.
    fit = [adapter for adapter in list_adapters() if wanted == "wgpu" or not adapter.software]
    assert choice.backend == ("wgpu" if fit and wanted != "cpu" else "cpu")
    assert choice.replica.device == ("wgpu:0" if choice.backend == "wgpu" else "cpu")
    assert ("cuda: " in choice.reason) == (wanted in ("auto", "cuda"))
    assert ("wgpu: " in choice.reason) == (wanted != "cpu" and not fit)
    assert ("falling back" in caplog.text) == (wanted not in ("auto", choice.backend))


@pytest.mark.parametrize("wanted", ["auto", "cuda", "wgpu", "cpu"])
def test_at_the_start_only_auto_falls_back(
    tiny_model: TinyModel, make_config: MakeConfig, wanted: RequestedBackend
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    there = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "wgpu": list_adapters()}
    if there[wanted]:
        choice = choose_replica(wanted, "", folder, config, layout, 1)
        assert wanted in ("auto", choice.backend)
        assert np.isfinite(trained_step(choice, initial_weights(layout, folder, config))).all()
        return
    with pytest.raises(InputError) as refused:
        choose_replica(wanted, "", folder, config, layout, 1)
    line = str(refused.value)
    assert line.startswith(f"--gpu-backend {wanted} is not available: {wanted}: ")
    assert line.endswith("; --gpu-backend auto without a device uses the first that works")
    assert "\n" not in line


def test_a_device_that_is_named_is_had_or_refused(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    with pytest.raises(InputError, match=r"^the device 77 is not available: cuda: .*; wgpu: .*"):
        choose_replica("auto", "77", folder, config, layout, 1)
    with pytest.raises(InputError, match=r"^--gpu-backend wgpu is not available: wgpu: "):
        choose_replica("wgpu", "77", folder, config, layout, 1)


@pytest.mark.usefixtures("vulkan", "in_a_run")
def test_a_gpu_that_computes_nonsense_is_passed_over(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = Device.create_pipeline

    def miscompiled(device: Device, code: str, constants: Any = None) -> Any:
        return compiled(device, code.replace("inverseSqrt(", "sqrt("), constants)

    monkeypatch.setattr(Device, "create_pipeline", miscompiled)
    folder = tiny_model()
    config = make_config(folder)
    choice = choose_replica("wgpu", "", folder, config, build_layout(folder, config), 1)
    assert choice.backend == "cpu"
    assert "failed the self-test" in choice.reason
    assert "falling back to cpu" in caplog.text


def test_the_first_backend_that_works_is_taken_and_the_reasons_are_kept(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    asked: list[str] = []

    def broken(reason: str):
        def open_(wish: BackendRequest) -> Replica:
            asked.append(wish.gpu)
            raise UnusableError(reason)

        return open_

    openers: dict[RequestedBackend, Opener] = {
        "cuda": broken("driver mismatch"),
        "wgpu": broken("no adapter"),
        "cpu": OPENERS["cpu"],
    }
    choice = choose_replica("auto", "", folder, config, layout, 1, openers)
    assert choice.backend == "cpu"
    assert choice.reason == "cuda: driver mismatch; wgpu: no adapter"
    with pytest.raises(InputError, match="cuda: driver mismatch; wgpu: no adapter"):
        choose_replica("auto", "GPU-1234", folder, config, layout, 1, openers)
    assert asked == ["", "", "GPU-1234", "GPU-1234"]


def test_without_a_vulkan_loader_nothing_of_wgpu_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import takes a second of each start."""

    def load(name: str) -> object:
        assert name == "libvulkan.so.1"
        raise OSError(name)

    monkeypatch.setattr(backend.ctypes, "CDLL", load)
    monkeypatch.setitem(sys.modules, "trainer.replica.wgpu", None)  # an import of it would fail
    with pytest.raises(UnusableError, match=r"^there is no Vulkan loader \(libvulkan\.so\.1\)$"):
        backend.open_vulkan_device("", allow_software=True)


@pytest.mark.usefixtures("vulkan", "in_a_run")
def test_a_model_that_our_engine_refuses_goes_to_torch(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    folder = tiny_model(rope_parameters=scaling)
    config = make_config(folder)
    choice = choose_replica("wgpu", "", folder, config, build_layout(folder, config), 1)
    assert choice.backend == "cpu"
    assert "rope_type 'yarn' is computed by transformers' code alone" in choice.reason


@pytest.mark.parametrize("lacking", ["divergence", "tail"])
@pytest.mark.usefixtures("vulkan", "in_a_run")
def test_a_distillation_that_our_engine_refuses_goes_to_torch(
    tiny_model: TinyModel, make_config: MakeConfig, lacking: str
) -> None:
    folder = tiny_model()
    divergence = "reverse" if lacking == "divergence" else "forward"
    config = make_config(folder, task="causal-lm", distillation__divergence=divergence)
    layout = build_layout(folder, config)
    choice = choose_replica("wgpu", "", folder, config, layout, 1, rest=lacking == "tail")
    assert choice.backend == "cpu"
    assert {
        "divergence": "distillation.divergence reverse is not computed by the wgpu engine",
        "tail": "it does not compute logits whose tail is one number",
    }[lacking] in choice.reason


def test_a_model_that_is_unusable_everywhere_is_no_reason_to_fall_back(
    tiny_model: TinyModel, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = tiny_model()
    config = make_config(folder)
    layout = build_layout(folder, config)
    with pytest.raises(InputError):
        choose_replica("auto", "", tmp_path, config, layout, 1)
