"""The engine torch: logits of given tokens, a few positions at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.run import Quantization, Resident
from trainer.config.teacher_engines import check_teacher_backend
from trainer.distill.teacher.model_parts import ModelParts
from trainer.model.architecture import parse_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.planning.forward import (
    ForwardPlan,
    ForwardSize,
    forward_bytes,
    frozen_setup,
    plan_forward,
)
from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.planning.model_config import read_shape
from trainer.planning.replica import USABLE
from trainer.planning.resident_layers import HEAD_STREAMED, choose_resident
from trainer.planning.teachers import BATCH
from trainer.replica.backend import (
    Compute,
    UnusableError,
    find_cuda_device,
    first_usable,
    format_reason,
)
from trainer.replica.residence import choose_residents
from trainer.replica.torch.device import available_bytes, spare_memory
from trainer.replica.torch.loader import load_frozen
from trainer.system.cgroups import free_memory
from trainer.system.errors import DoesNotFitError, InputError

log = logging.getLogger(__name__)


class TorchEngine:
    """Any causal language model of transformers, on the CPU or one CUDA device.

    `replica.torch.decoder` is taken where it computes the model: its import is cheaper. On the CPU,
    weights stored in `dtype` are mapped from the file if all layers stay, so that processes share
    them.

    Args:
        device: `cpu` or `cuda:N`.
        resident: layers that stay in memory; the others are read at each forward. None: all.
        length: the most tokens of a window; None: all positions of the model.
        published: by transformers' own code in any case.
        quantization: of linears and experts; `dtype` is that of the rest and of all products.

    Raises:
        InputError: the model cannot be loaded, or its head's size differs from its config.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        resident: int | None = None,
        length: int | None = None,
        published: bool = False,
        quantization: Quantization = "none",
    ) -> None:
        self.device, self.place = torch.device(device), device
        published = published or is_published(model_dir, length)
        parts = _load_parts(model_dir, dtype, self.device, published, resident, quantization)
        self.model = parts.model
        self._backbone, self._head = parts.backbone, parts.head
        self.vocab_size = parts.vocab_size

    @torch.no_grad()
    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """See `Engine`."""
        ids, rows, places = (part.to(self.device, non_blocking=True) for part in pad_windows(batch))
        hidden = self._backbone(ids)
        for part in hidden[rows, places].split(rows_at_once(self.vocab_size, self.device)):
            yield self._head(part)


def pad_windows(batch: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return windows as rows of one batch, and the row and place of each token but the last ones.

    Causal attention ignores the right, so padding there needs no mask. All are on the CPU: the
    host would wait for a device that finds the places.
    """
    lengths = torch.tensor([len(tokens) for tokens in batch])
    ids = torch.zeros((len(batch), int(lengths.max())), dtype=torch.int64)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
    rows, places = (torch.arange(ids.shape[1]) < lengths[:, None] - 1).nonzero(as_tuple=True)
    return ids, rows, places


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return the positions whose logits exist at once."""
    elements = LOGIT_ELEMENTS * (1 if device.type == "cpu" else 8)
    return max(1, elements // vocab_size)


_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Name of an expert that is stored alone: transformers copies such ones into one tensor a layer."""


def weight_bytes(
    model_dir: Path, dtype: torch.dtype, quantization: Quantization = "none"
) -> tuple[int, int]:
    """Return the bytes of a model's weights on the CPU: loaded, and mapped as they are stored."""
    if quantization != "none":
        setup, nothing = frozen_setup(dtype.itemsize, quantization), ForwardSize(0, 0)
        shape = read_shape(model_dir)
        return plan_forward(shape, setup, nothing, None, accelerator=False).total, 0
    stored = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    sizes = {True: 0, False: 0}
    for name, header in read_headers(model_dir).items():
        mapped = header.dtype == stored and not _EXPERT.search(name)
        sizes[mapped] += dtype.itemsize * math.prod(header.shape)
    return sizes[False], sizes[True]


def warn_if_from_disk(model: Path, mapped: int, free: int) -> None:
    """Log that a model is slow whose mapped weights exceed the memory that is left for them."""
    if mapped > free:
        log.warning(
            "%s: its weights take %.1f GB, and %.1f GB of main memory are free for them: each"
            " forward reads them from the disk again",
            model,
            mapped / 1e9,
            max(0, free) / 1e9,
        )


def needed_bytes(
    model_dir: Path,
    dtype: torch.dtype,
    forward: ForwardSize | None,
    quantization: Quantization = "none",
) -> int:
    """Return the least main memory that a teacher runs in on the CPU, as `launch plan` counts it.

    Weights that are not mapped, a forward's tensors, and of mapped weights those in use at a time.
    """
    loaded, mapped = weight_bytes(model_dir, dtype, quantization)
    if forward is None:
        return loaded
    try:
        shape = read_shape(model_dir)
    except InputError:  # transformers may compute what is not planned
        return loaded
    at_a_time = shape.layer_parameters - shape.layer_experts + shape.table_parameters
    working = forward_bytes(
        shape, forward.tokens, dtype.itemsize, forward.length, accelerator=False
    )
    return loaded + min(mapped, at_a_time * dtype.itemsize) + working


def check_room(
    model_dir: Path,
    dtype: torch.dtype,
    forward: ForwardSize | None = None,
    quantization: Quantization = "none",
) -> None:
    """Check that the weights fit the main memory as far as they are not mapped, with a forward.

    Raises:
        DoesNotFitError: they do not; says what would.
    """
    need = needed_bytes(model_dir, dtype, forward, quantization)
    _, mapped = weight_bytes(model_dir, dtype, quantization)
    free = free_memory(psutil.virtual_memory().available)
    if need <= free:
        warn_if_from_disk(model_dir, mapped, free - need)
        return
    needed = partial(needed_bytes, model_dir, quantization=quantization)
    raise _refuse_memory(model_dir, dtype, forward, needed, free, quantization=quantization)


def _refuse_memory(
    model_dir: Path,
    dtype: torch.dtype,
    forward: ForwardSize | None,
    needed: Callable[[torch.dtype, ForwardSize | None], int],
    free: int,
    where: str = "main memory",
    advice: str = "",
    quantization: Quantization = "none",
    packed: int | None = None,
) -> DoesNotFitError:
    """Return the error of a teacher that does not fit, with what would.

    Args:
        packed: bytes of one in NF4; None: there is none.
        advice: what is tried first; empty: by what is needed.
    """
    need, name = needed(dtype, forward), str(dtype).removeprefix("torch.")
    name = name if quantization == "none" else f"{quantization} and {name}"
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    less = needed(other, forward)
    smaller = forward and next(
        (
            tokens
            for tokens in (forward.tokens >> halvings for halvings in range(1, 16))
            if tokens >= forward.length and needed(dtype, forward._replace(tokens=tokens)) <= free
        ),
        None,
    )
    if advice:
        advice = f"use {advice}"
    elif smaller:
        advice = f"--batch-tokens {smaller} fits"
    elif less <= free:
        advice = f"--dtype {str(other).removeprefix('torch.')} needs {less / 1e9:.1f} GB"
    elif packed is not None and packed <= free:
        advice = f"--quantization nf4 needs {packed / 1e9:.1f} GB"
    elif any(map(_EXPERT.search, read_headers(model_dir))):
        advice = "use a host with more memory, or a smaller teacher"
    else:
        advice = "use a GGUF file of it, with --engine gguf"
    return DoesNotFitError(
        f"{model_dir}: needs {need / 1e9:.1f} GB of {where} in {name}, and {free / 1e9:.1f} GB are"
        f" free; {advice}"
    )


def _choose_layers(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    asked: Resident,
    size: ForwardSize,
    quantization: Quantization,
) -> int | None:
    """Return how many layers stay; None for all.

    Raises:
        InputError: the forward does not fit; says what would.
    """
    shape, cuda, free = read_shape(model_dir), device.type == "cuda", available_bytes(device)

    def plan(
        resident: int | None, dtype: torch.dtype = dtype, size: ForwardSize | None = size
    ) -> ForwardPlan:
        assert size is not None
        setup = frozen_setup(dtype.itemsize, quantization)
        return plan_forward(shape, setup, size, resident, accelerator=cuda)

    found = choose_residents(
        model_dir,
        asked,
        str(device),
        plan,
        lambda layers: choose_resident(plan, layers, lambda some: some.total <= free * USABLE),
        size=lambda some: some.total,
        usable=free * USABLE,
    )
    if asked == "auto":  # of a small model two layers may be more than all
        found = min(found, plan(None), key=lambda some: (some.total > free, some.resident is None))
    if found.total > free:
        where = f"the memory of {device}" if cuda else "main memory"
        packed = frozen_setup(dtype.itemsize, "nf4")
        raise _refuse_memory(
            model_dir,
            dtype,
            size,
            lambda kind, smaller: plan(found.resident, kind, smaller).total,
            free,
            where,
            "" if found.resident in (0, HEAD_STREAMED) else "--resident auto",
            quantization,
            plan_forward(shape, packed, size, found.resident, accelerator=cuda).total,
        )
    spare_memory(device, found.total, free)
    return found.resident


def _load_parts(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    published: bool,
    resident: int | None,
    quantization: Quantization,
) -> ModelParts:
    if published:
        from trainer.distill.teacher.published_model import load_published

        return load_published(model_dir, dtype, device, resident, quantization)
    model = load_frozen(model_dir, dtype, device, resident, quantization)

    def run_backbone(ids: Tensor) -> Tensor:
        return model.model(ids).last_hidden_state

    return ModelParts(model, run_backbone, model.lm_head, model.lm_head.out_features)


def is_published(model_dir: Path, length: int | None = None) -> bool:
    """Return whether transformers' code computes a model, not Motley's decoder.

    Args:
        length: as of `TorchEngine`.
    """
    tree = read_config(model_dir)
    try:
        parse_architecture(tree, str(model_dir))
    except InputError:  # transformers may support it
        return True
    return explain_transformers_only(tree, length) is not None


def check_unplanned(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    asked: Resident,
    forward: ForwardSize | None = None,
    quantization: Quantization = "none",
) -> bool:
    """Return whether a model's sizes are unknown, so that all of its layers stay.

    Raises:
        InputError: a number of layers or NF4 is asked of such a model, or it does not fit.
    """
    try:
        read_shape(model_dir)
    except InputError as error:  # transformers may compute what is not planned
        if isinstance(asked, int):
            raise InputError(f"--resident {asked}: {error}; use all or auto") from None
        if quantization != "none":
            raise InputError(f"--quantization {quantization}: {error}; use none") from None
    else:
        return False
    if device.type == "cpu":  # whose kernel kills what exceeds a limit
        check_room(model_dir, dtype, forward)
    return True


def open_torch(
    model_dir: Path,
    dtype: str,
    compute: Compute,
    forward: ForwardSize,
    quantization: Quantization = "none",
) -> TorchEngine:
    """Load a teacher on CUDA if that works, else on the CPU.

    Layers that do not fit beside a forward are read at each one.

    Raises:
        InputError: the model cannot be loaded.
        DoesNotFitError: it needs more memory than is free.
    """
    check_teacher_backend("torch", compute.backend, compute.gpu)
    device = choose_device(compute, dtype, quantization)
    kind, place = getattr(torch, dtype), "cuda" if device.type == "cuda" else "cpu"
    size = forward._replace(tokens=max(forward.tokens or BATCH[place], forward.length))
    if check_unplanned(model_dir, kind, device, compute.resident, size, quantization):
        return TorchEngine(model_dir, kind, str(device))
    resident = _choose_layers(model_dir, kind, device, compute.resident, size, quantization)
    return TorchEngine(
        model_dir,
        kind,
        str(device),
        resident=resident,
        length=size.length,
        quantization=quantization,
    )


def choose_device(
    compute: Compute, dtype: str, quantization: Quantization = "none"
) -> torch.device:
    """Return where a teacher computes, CUDA if that works.

    Raises:
        InputError: what was asked for is not available.
    """
    device, _, reason = first_usable(
        compute.backend,
        compute.gpu,
        {"cuda": lambda: find_cuda_device(compute.gpu), "wgpu": _no_wgpu, "cpu": lambda: "cpu"},
    )
    log.info("the teacher is on %s%s", device, format_reason(reason))
    if device == "cpu" and dtype == "bfloat16" and emulates_bf16(torch.cpu.get_capabilities()):
        log.warning(
            "this CPU computes bf16 by emulation; --dtype float32, with %sa folder of its own, is"
            " two to three times as fast",
            "twice the memory and " if quantization == "none" else "",
        )
    return torch.device(device)


def emulates_bf16(capabilities: Mapping[str, Any]) -> bool:
    """Whether a CPU multiplies in bf16 more slowly than in fp32.

    Measured: 2.2 times as fast with AVX512-BF16; with AVX512 alone 1.8 times as slow, with AVX2
    2.8 times.
    """
    is_x86 = capabilities.get("architecture") == "x86_64"
    return is_x86 and not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _no_wgpu() -> str:
    raise UnusableError("torch does not compute there")
