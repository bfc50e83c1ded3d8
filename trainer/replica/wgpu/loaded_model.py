"""Load a model directory as a decoder on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.run import Resident, RunConfig
from trainer.model.architecture import read_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.header_layout import NamedTensor
from trainer.model.initialization import initial_tensor
from trainer.model.layout import GradientLayout, lay_out_tensors
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.planning.resident_layers import HEAD_STREAMED, choose_group
from trainer.planning.vulkan_buffers import count_slots
from trainer.replica.residence import choose_residents
from trainer.replica.rope import compute_rope_tables
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import (
    USABLE,
    MemoryBudget,
    MemoryPool,
    check_fits,
    measure_available_memory,
)
from trainer.replica.wgpu.layers.decoder import Decoder, Tensors
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads
from trainer.replica.wgpu.weights.loader import load_frozen, take_frozen
from trainer.replica.wgpu.weights.slots import Slots
from trainer.system.errors import InputError
from trainer.system.process.slow_log import log_if_slow


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, its trainable weights by block, and their gradients unless it only evaluates."""

    decoder: Decoder
    slots: Slots
    weights: list[Array]
    gradients: list[Array]
    uploads: LayerUploads | None
    """Writes the layers that are not resident; None: all are."""

    def write(self, device: Device, flat: np.ndarray) -> None:
        """Copy fp32 `[layout.size]` into the trainable weights."""
        layout = self.slots.layout
        assert flat.dtype == np.float32, f"weights are fp32, got {flat.dtype}"
        assert flat.shape == (layout.size,), f"{flat.shape} is not ({layout.size},)"
        for block, array in zip(layout.blocks, self.weights, strict=True):
            device.write(array, self.slots.pad_block(block.index, flat[block.start : block.stop]))

    def read(self, device: Device, model_dir: Path, seed: int) -> None:
        """Copy `initial_weights` into the trainable weights, one block at a time."""
        headers = read_headers(model_dir)
        for block, array in zip(self.slots.layout.blocks, self.weights, strict=True):
            parts = [initial_tensor(headers, seed, slot) for slot in block.tensors]
            device.write(array, self.slots.pad_block(block.index, np.concatenate(parts)))


def freeze_weights(
    model_dir: Path, config: RunConfig, layout: GradientLayout
) -> tuple[RunConfig, GradientLayout]:
    """Return config and layout of a model that is used, not trained: a full one is all frozen.

    Its matrices are bf16 if everything is stored so. A classifier's head stays in the layout.
    """
    if config.method != "full":
        return config, layout
    kinds = {header.dtype for header in read_headers(model_dir).values()}
    dtype = "bfloat16" if kinds == {"BF16"} else "float32"
    model = config.model.model_copy(update={"dtype": dtype})
    heads = [
        (block.name, [NamedTensor(slot.name, slot.shape) for slot in block.tensors])
        for block in layout.blocks
        if block.name == "head" and config.task == "classify"
    ]
    frozen = config.model_copy(update={"method": "lora", "model": model})
    return frozen, lay_out_tensors(heads)


class Residence(NamedTuple):
    """Layers that stay, and the memory that a model then takes."""

    resident: int | None
    """None: all."""
    budget: MemoryBudget
    recompute: bool = False
    """Layers are computed twice."""
    waiting: int = 0
    """Tokens of the other micro-batches of a group."""


def choose_layers(
    model_dir: Path,
    asked: Resident,
    device: Device,
    plan: Callable[[int, int | None], MemoryBudget],
    least: Callable[[int | None], MemoryBudget],
    *,
    most: int = 1,
    others: int = 0,
) -> int | None:
    """Return the layers of a model that is used, not trained, that stay on a device; None: all.

    Args:
        plan: returns the memory that should be free for chunks of a prompt that a layer takes
            before the next one, and for a number of such layers; None: all.
        least: returns what suffices for a number of such layers.
        most: chunks of a prompt.
        others: passes of single tokens after it.

    Raises:
        InputError: it does not fit.
    """
    there = measure_available_memory(device.adapter)

    def plan_residents(chunks: int, some: int | None) -> Residence:
        return Residence(some, plan(chunks, some))

    def fits_device(_: int, found: Residence) -> bool:
        return there is None or found.budget.total <= there * USABLE

    chosen = choose_residents(
        model_dir,
        asked,
        f"wgpu:{device.adapter.index}",
        partial(plan_residents, 1),
        lambda layers: choose_group(
            plan_residents,
            layers,
            most,
            fits_device,
            lambda found: found.resident,
            others=others,
        ),
        # More tokens do not read a head less often.
        size=lambda found: least(found.resident).total,
        usable=math.inf if there is None else there * USABLE,
    )
    resident = chosen.resident
    if there is not None and not fits_device(1, chosen):
        streams = resident in (0, HEAD_STREAMED)
        fewer = "fewer tokens" if streams else "--resident auto or fewer tokens"
        check_fits(least(resident), there, device.adapter.name, fewer)
    return resident


def plan_decoder(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    pool: MemoryPool,
    resident: int | None,
) -> Decoder:
    """Return what `load_model` loads to evaluate, on memory of a pool without a device."""
    config, layout = freeze_weights(model_dir, config, layout)
    architecture, slots = read_architecture(model_dir), Slots(layout)
    tables = count_slots(config.data.max_seq_len, 0), architecture.head_dim // 2
    tensors = Tensors(
        take_frozen(architecture, config, pool, resident),
        slots.tensors_by_name(slots.take_arrays(pool, "trainable")),
        {},
        (pool.take(tables, purpose="frozen"), pool.take(tables, purpose="frozen")),
    )
    return Decoder(architecture, read_config(model_dir), config, tensors)


def load_model(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    device: Device,
    *,
    evaluates: bool = False,
    resident: int | None = None,
) -> LoadedModel:
    """Load a model onto a device; trainable weights are undefined until written.

    Args:
        evaluates: nothing is trained, and a full model is frozen.
        resident: layers whose frozen linears stay on the device; None: those of `model.resident`,
            which `auto` leaves at all.

    Raises:
        InputError: the directory cannot be read, or the engine does not compute this model.
        DeviceError: it does not fit.
    """
    tree, where = read_config(model_dir), str(model_dir / "config.json")
    if reason := explain_transformers_only(tree, config.data.max_seq_len):
        raise InputError(f"{where}: {reason}; use --gpu-backend cpu or cuda")
    if complete := evaluates and config.method == "full":
        config, layout = freeze_weights(model_dir, config, layout)
    architecture = read_architecture(model_dir)
    length = count_slots(config.data.max_seq_len, 0)
    tables = compute_rope_tables(tree, architecture.head_dim, length, where)
    pool, slots = MemoryPool(device), Slots(layout)
    with log_if_slow(f"loading {model_dir}"):
        frozen = load_frozen(model_dir, config, pool, resident)
    weights = slots.take_arrays(pool, "trainable")
    gradients = [] if evaluates else slots.take_arrays(pool, "gradients")
    cosines, sines = (device.create_array(table.shape) for table in tables)
    device.write(cosines, tables[0])
    device.write(sines, tables[1])
    of_gradients = slots.tensors_by_name(gradients) if gradients else {}
    tensors = Tensors(frozen.arrays, slots.tensors_by_name(weights), of_gradients, (cosines, sines))
    decoder = Decoder(architecture, tree, config, tensors)
    loaded = LoadedModel(decoder, slots, weights, gradients, frozen.uploads)
    if complete:
        loaded.read(device, model_dir, config.training.seed)
    return loaded
