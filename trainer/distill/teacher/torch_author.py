"""The model of `trainer distill generate`: a teacher that continues prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.run import Quantization, load_config
from trainer.distill.answers.author import Generate
from trainer.distill.teacher.torch_engine import (
    TorchEngine,
    check_unplanned,
    choose_device,
    is_published,
)
from trainer.model.architecture import read_architecture
from trainer.model.families import find_family
from trainer.model.safetensors_headers import read_config
from trainer.planning.forward import frozen_setup
from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.backend import Compute
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.generator import make_generator
from trainer.replica.torch.model import find_backbone
from trainer.replica.torch.residence import AnswerPlan, plan_answers
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.distill.teacher.kv_offload import KVOffload


def open_generate(
    model_dir: Path,
    dtype: str,
    compute: Compute,
    batch: int,
    length: int,
    offload: KVOffload | None = None,
    quantization: Quantization = "none",
) -> Generate:
    """Load a model on CUDA if that works, else on the CPU, and return what continues prompts.

    A Vulkan device is taken if it is asked for.

    Args:
        batch: the most answers that are written together.
        length: tokens of the longest prompt with its answer.
        offload: keeps keys and values of layers elsewhere.

    Raises:
        InputError: the model cannot be loaded, is of an architecture that Motley does not know, or
            its keys and values cannot be kept as asked.
    """
    if compute.threads is not None:
        torch.set_num_threads(compute.threads)
    find_family(read_config(model_dir), str(model_dir))
    if compute.backend == "wgpu":
        if offload is not None:
            raise InputError("--kv-offload is for a teacher that torch computes; leave it out")
        from trainer.distill.teacher.wgpu_engine import open_wgpu_generator

        return open_wgpu_generator(model_dir, dtype, compute, batch, length, quantization).generate
    device, kind = choose_device(compute, dtype, quantization), getattr(torch, dtype)
    spare, elsewhere = None, 0
    if offload is not None:
        from trainer.distill.teacher.kv_offload import count_fitting, open_device

        spare = open_device(offload)
        if not is_published(model_dir, length):  # else its layers are known once it is loaded
            rows = min(offload.answers, batch)
            room = count_fitting(offload, spare, *_decoder_layers(model_dir), rows)
            elsewhere = min(offload.layers or room, room)
    setup, plan = frozen_setup(kind.itemsize, quantization), AnswerPlan(None, batch, batch)
    if not check_unplanned(model_dir, kind, device, compute.resident, quantization=quantization):
        asked = compute.resident
        plan = plan_answers(model_dir, setup, asked, length, device, batch, elsewhere)
    engine = TorchEngine(
        model_dir,
        kind,
        str(device),
        resident=plan.resident,
        length=length,
        quantization=quantization,
    )
    settings = {
        "task": "causal-lm",
        "method": "full",
        "model.path": str(model_dir),
        "data.train": "none",
        "training.precision": "fp32",  # products take the weights' own dtype
    }
    config = load_config(None, settings)
    generator = make_generator(engine.model, model_dir, config, engine.device, batch=plan.batch)
    if offload is None or spare is None:
        return generator.generate
    from trainer.distill.teacher.kv_offload import open_store, with_fallback

    shape, layers = _storable_layers(engine.model, model_dir)
    rows = min(offload.answers, generator.batch)
    like = torch.empty(0, dtype=kind, device=device)  # a weight in NF4 has another type
    generator.store = open_store(offload, spare, shape, layers, rows, like)
    return with_fallback(generator, plan.batch_alone)


def _decoder_layers(model_dir: Path) -> tuple[KVShape, Sequence[int]]:
    found = read_architecture(model_dir)
    shape = KVShape(found.num_heads, found.num_kv_heads, found.head_dim)
    return shape, range(found.num_layers)


def _storable_layers(model: Any, model_dir: Path) -> tuple[KVShape, Sequence[int]]:
    """Return the layers whose keys and values may be kept elsewhere, and their shape.

    Raises:
        InputError: there are none.
    """
    if isinstance(model, Decoder):
        return _decoder_layers(model_dir)
    from trainer.replica.torch.published_cache import storable_layers

    shape, layers = storable_layers(find_backbone(model))
    if shape is None:
        raise InputError(
            f"{model_dir}: --kv-offload needs layers that attend to all tokens by scaled dot"
            " products alone, and this model has none; leave it out"
        )
    return shape, layers
