"""Select a worker's backend: CUDA, else wgpu, else the CPU, each tested before it is used.

A backend that computes nonsense is skipped like a missing one (F-DP-004). The chain of `auto`
always ends in a replica, and reports which one and why. A requested backend or device is used or
refused, except by a process that is restarted during a run: it continues with what is left
(`FALLBACK_VARIABLE`).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from trainer.config.run import Quantization, Resident, RunConfig
from trainer.model.families import explain_transformers_only
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config
from trainer.replica.base import Replica
from trainer.system.backends import BACKENDS, RequestedBackend
from trainer.system.errors import InputError
from trainer.system.process.child import FALLBACK_VARIABLE, NO_GPU
from trainer.system.process.imports import speed_up_imports
from trainer.system.process.slow_log import log_if_slow

if TYPE_CHECKING:
    from trainer.replica.script.user_script import UserScript
    from trainer.replica.wgpu.gpu.device import Device

log = logging.getLogger(__name__)

Opened = TypeVar("Opened")

CHAIN: tuple[RequestedBackend, ...] = tuple(BACKENDS)


class UnusableError(Exception):
    """A backend cannot be used here; the message says why."""


class AbsentError(UnusableError):
    """This machine has no device for a backend; the message says what is missing."""


@dataclass(frozen=True)
class Compute:
    """Where a model computes; it falls back as training does."""

    backend: RequestedBackend = "auto"
    gpu: str = ""
    """An index, UUID, PCI address or name; empty for the first."""
    threads: int | None = None
    resident: Resident = "auto"
    """Layers that stay in memory; the others are read at each use."""
    quantization: Quantization | None = None
    """Format of linears and experts; None: as trained."""

    def apply_storage(self, config: RunConfig) -> RunConfig:
        """Return a config of a trained model that is used with these layers and weights.

        Nothing trains, so that a full model takes a number and NF4, too.
        """
        changes: dict[str, object] = {"resident": self.resident}
        if self.quantization is not None:
            changes["quantization"] = self.quantization
        model = config.model.model_copy(update=changes)
        return config.model_copy(update={"model": model})


@dataclass(frozen=True)
class ReplicaChoice:
    """A replica, its backend, and why no earlier one was taken."""

    replica: Replica
    backend: RequestedBackend
    reason: str
    """It begins with `NO_GPU` if that is all."""

    @property
    def residents(self) -> str:
        """How many layers of the base stay in memory, in words; empty if all do."""
        return getattr(self.replica, "residents", "")

    @property
    def explanation(self) -> str:
        """Why no earlier backend was taken, and how many layers stay if not all do."""
        return "; ".join(filter(None, (self.reason, self.residents)))


@dataclass(frozen=True)
class BackendRequest:
    """The replica to open."""

    model_dir: Path
    config: RunConfig
    layout: GradientLayout
    gpu: str
    """An index, UUID, PCI address or name; empty for the first."""
    threads: int | None
    named: bool
    """Whether this backend was requested by name."""
    rest: bool
    """A teacher's predictions are stored in part only as a sum."""
    moments: bool
    """The caller keeps the optimizer's moments on the device."""
    coordinates: bool
    """The process is the run's coordinator too."""
    evaluates: bool
    """Nothing is trained."""
    reference: np.ndarray | None = None
    """The weights that task `dpo` compares with; None: those of the base."""
    script: UserScript | None = None
    """Has the model, in place of `model_dir`."""


Opener = Callable[[BackendRequest], Replica]


def choose_replica(
    wanted: RequestedBackend,
    gpu: str,
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    threads: int | None,
    openers: dict[RequestedBackend, Opener] | None = None,
    *,
    rest: bool = False,
    moments: bool = False,
    coordinates: bool = False,
    evaluates: bool = False,
    reference: np.ndarray | None = None,
    script: UserScript | None = None,
) -> ReplicaChoice:
    """Open the first backend that works and that the request allows (`first_usable`).

    Args:
        gpu: an index, UUID, PCI address or name; empty for the first.
        rest: a teacher's predictions are stored in part only as a sum.
        moments: the caller keeps the optimizer's moments on the device, as a student does.
        coordinates: the process is the run's coordinator too.
        evaluates: nothing is trained, so there are no gradients, and a full model's weights are
            those of `model_dir` before anything is written.
        reference: the weights that task `dpo` compares with; None: those of the base.
        script: has the model, in place of `model_dir`.

    Raises:
        InputError: the request cannot be met, or the model cannot be used on any backend.
    """
    openers = openers or OPENERS

    def make_opener(backend: RequestedBackend) -> Callable[[], Replica]:
        named = backend == wanted
        request = BackendRequest(
            model_dir,
            config,
            layout,
            gpu,
            threads,
            named,
            rest,
            moments,
            coordinates,
            evaluates,
            reference,
            script,
        )
        return lambda: openers[backend](request)

    return ReplicaChoice(
        *first_usable(wanted, gpu, {backend: make_opener(backend) for backend in CHAIN})
    )


def first_usable(
    wanted: RequestedBackend, gpu: str, openers: Mapping[RequestedBackend, Callable[[], Opened]]
) -> tuple[Opened, RequestedBackend, str]:
    """Open the first usable backend of those that the request allows.

    Also return the backend's name and why no earlier one was taken. An opener raises
    `UnusableError` if it cannot open.

    Raises:
        InputError: the requested backend or device is not available.
    """
    reasons: list[str] = []
    absent = wanted == "auto" and not os.environ.get(FALLBACK_VARIABLE)
    for backend in _backends_to_try(wanted, gpu):
        try:
            opened = openers[backend]()
        except UnusableError as error:
            reasons.append(f"{backend}: {error}")
            absent = absent and isinstance(error, AbsentError)
            continue
        reason = "; ".join(reasons)
        if reasons and absent:
            reason = f"{NO_GPU} ({reason})"
        if reasons and wanted != "auto":
            log.warning("falling back to %s (%s)", backend, reason)
        return opened, backend, reason
    asked = f"the device {gpu}" if wanted == "auto" else f"--gpu-backend {wanted}"
    raise InputError(
        f"{asked} is not available: {'; '.join(reasons)}; --gpu-backend auto without a device "
        "uses the first that works"
    )


def format_reason(reason: str) -> str:
    """Return why a backend was taken as the end of a line: in short on a machine without a GPU."""
    short = NO_GPU if reason.startswith(NO_GPU) else reason
    return f" ({short})" if short else ""


def _backends_to_try(wanted: RequestedBackend, gpu: str) -> tuple[RequestedBackend, ...]:
    """Return the backends to try, in order."""
    if os.environ.get(FALLBACK_VARIABLE):
        return CHAIN if wanted == "auto" else CHAIN[CHAIN.index(wanted) :]
    if wanted != "auto":
        return (wanted,)
    return tuple(backend for backend in CHAIN if not (gpu and backend == "cpu"))


def find_cuda_device(gpu: str) -> str:
    """Return torch's name of a working CUDA device.

    Raises:
        UnusableError: there is none.
    """
    try:  # what torch opens, without its import of seconds
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise AbsentError("there is no NVIDIA driver (libcuda.so.1)") from None
    if gpu and not gpu.isdecimal():
        # Before torch lists the devices: it then sees this one alone, as number 0.
        os.environ["CUDA_VISIBLE_DEVICES"], gpu = gpu, "0"
    with speed_up_imports("torch"):
        import torch
    if torch.version.cuda is None:
        raise UnusableError("this torch was built without CUDA")
    if not torch.cuda.is_available():
        raise UnusableError("no CUDA device answers")
    if int(gpu or 0) >= (count := torch.cuda.device_count()):
        raise UnusableError(f"there is no CUDA device {gpu} (there are {count}, counted from 0)")
    device = f"cuda:{gpu or 0}"
    try:
        probe = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
        product = (probe @ probe).cpu().numpy()
    except (RuntimeError, AssertionError) as error:
        raise UnusableError(f"{device} failed: {str(error).splitlines()[0]}") from None
    x = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
    if not np.allclose(product, x @ x, atol=1e-2):
        raise UnusableError(f"{device} computes a wrong product")
    return device


def check_vulkan_computes(model_dir: Path, config: RunConfig) -> None:
    """Refuse, before a device is opened, a model that the WGSL kernels do not compute.

    Raises:
        UnusableError: names what they do not compute.
    """
    if reason := explain_transformers_only(read_config(model_dir), config.data.max_seq_len):
        raise UnusableError(reason)


def open_vulkan_device(gpu: str, *, allow_software: bool) -> Device:
    """Return an opened Vulkan device that passes the admission test.

    Raises:
        UnusableError: there is none.
    """
    try:  # what wgpu opens, without its import of a second
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        raise AbsentError("there is no Vulkan loader (libvulkan.so.1)") from None
    try:
        from trainer.replica.wgpu import autotune
        from trainer.replica.wgpu.gpu.device import Device
        from trainer.replica.wgpu.gpu.errors import DeviceError, NoGpuError
        from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
        from trainer.replica.wgpu.selftest import verify_device
    except (ImportError, OSError) as error:
        raise UnusableError(f"wgpu cannot be loaded: {str(error).splitlines()[0]}") from None
    try:
        device = Device(select_adapter(gpu, allow_software=allow_software))
        with log_if_slow(f"compiling kernels for {device.adapter.name} and testing them"):
            autotune.load_table(device)
            verify_device(device)
    except NoGpuError as error:
        raise AbsentError(str(error)) from None
    except DeviceError as error:
        raise UnusableError(str(error)) from None
    return device


def _open_cuda(request: BackendRequest) -> Replica:
    device = find_cuda_device(request.gpu)
    return _torch_replica(request, device)


def _open_wgpu(request: BackendRequest) -> Replica:
    """Open our engine; a software adapter is opened only if wgpu was requested.

    Torch may still run what it refuses, such as a model beyond the card's memory.
    """
    if request.script is not None:
        raise UnusableError("a script computes with torch")
    if request.moments:
        raise UnusableError("students are trained by torch")
    if request.rest:
        raise UnusableError("it does not compute logits whose tail is one number (tail_samples 0)")
    check_vulkan_computes(request.model_dir, request.config)
    device = open_vulkan_device(request.gpu, allow_software=request.named)
    from trainer.replica.wgpu.gpu.errors import DeviceError
    from trainer.replica.wgpu.replica import WgpuReplica

    try:
        return WgpuReplica(
            request.model_dir,
            request.config,
            request.layout,
            device,
            evaluates=request.evaluates,
        )
    except (DeviceError, InputError) as error:
        raise UnusableError(str(error)) from None


def _open_cpu(request: BackendRequest) -> Replica:
    return _torch_replica(request, "cpu")


def _torch_replica(request: BackendRequest, device: str) -> Replica:
    if request.script is not None:
        from trainer.replica.script.replica import ScriptReplica

        return ScriptReplica(request.script, request.config, device, request.threads)
    with speed_up_imports("torch"):
        from trainer.replica.torch.replica import TorchReplica
    return TorchReplica(
        request.model_dir,
        request.config,
        request.layout,
        device,
        request.threads,
        moments=request.moments,
        coordinates=request.coordinates,
        evaluates=request.evaluates,
        reference=request.reference,
    )


OPENERS: dict[RequestedBackend, Opener] = {"cuda": _open_cuda, "wgpu": _open_wgpu, "cpu": _open_cpu}
