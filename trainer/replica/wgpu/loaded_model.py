"""Load a model directory as a decoder on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.initialization import initial_tensor
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.planning.vulkan_buffers import count_slots
from trainer.replica.rope import compute_rope_tables
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layers.decoder import Decoder, Tensors
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads
from trainer.replica.wgpu.weights.loader import load_frozen
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
        evaluates: nothing is trained, and a full model's weights are read at once.
        resident: layers whose frozen linears stay on the device; None: those of `model.resident`,
            which `auto` leaves at all.

    Raises:
        InputError: the directory cannot be read, or the engine does not compute this model.
        DeviceError: it does not fit.
    """
    tree, where = read_config(model_dir), str(model_dir / "config.json")
    if reason := explain_transformers_only(tree, config.data.max_seq_len):
        raise InputError(f"{where}: {reason}; use --gpu-backend cpu or cuda")
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
    if evaluates and config.method == "full":
        loaded.read(device, model_dir, config.training.seed)
    return loaded
