"""The engine wgpu: logits of given tokens by Motley's own kernels, on a device with Vulkan.

Products have fp32 factors and sums, whatever the dtype of the weights. Layers that do not fit
beside a forward are read at each one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.run import Quantization, RunConfig, load_config
from trainer.config.teacher_engines import check_teacher_backend
from trainer.data.tokens import Encoded
from trainer.model.layout import GradientLayout, lay_out_tensors
from trainer.planning.forward import ForwardSize
from trainer.planning.teachers import BATCH
from trainer.planning.vulkan_buffers import logit_rows, padded_length
from trainer.replica.backend import (
    Compute,
    UnusableError,
    check_vulkan_computes,
    open_vulkan_device,
)
from trainer.replica.wgpu.batch import Bucket, pack_samples
from trainer.replica.wgpu.generation.generator import WgpuGenerator, load_generator
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError, OutOfMemoryError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryBudget, MemoryPool
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.loaded_model import LoadedModel, choose_layers, load_model, plan_decoder
from trainer.replica.wgpu.planning import widest_activation
from trainer.system.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recording:
    graph: Graph
    vector: Array
    """u32 `[bucket.words]`"""
    table: Array
    """The embedding, or the rows of a batch's tokens."""
    logits: Array
    """f32 `[N, V]`, of one chunk of targets."""
    chunks: list[list[str]]
    """The segments that run for each chunk of targets."""


class WgpuEngine:
    """A causal language model on one device.

    Args:
        loaded: without gradients.
    """

    def __init__(self, device: Device, loaded: LoadedModel) -> None:
        self.device = torch.device("cpu")
        self.place = f"wgpu:{device.adapter.index}"
        self.vocab_size = loaded.decoder.architecture.vocab_size
        self._device, self._loaded = device, loaded
        self._pool = MemoryPool(device)
        self._made: tuple[Bucket, _Recording] | None = None

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """See `Engine`."""
        micro, uploads = pack_samples([Encoded(ids, ids) for ids in batch]), self._loaded.uploads
        recording = self._find_recording(micro.bucket)
        if uploads is not None and uploads.embedding is not None:
            micro, tokens = micro.list_tokens()
            uploads.embedding.write(recording.table, tokens)
        self._device.write(recording.vector, micro.vector)
        graph, left = recording.graph, micro.weight
        if uploads is not None:
            uploads.announce([graph.segments])
        # Some systems consider a device hung that is busy for seconds with one submission.
        for segments in recording.chunks:
            for name in segments:
                if uploads is not None:
                    uploads.write_layer(name)
                graph.run(*graph.find_segment(name))
            logits = recording.logits.slice_rows(0, min(left, recording.logits.shape[0]))
            yield torch.from_numpy(np.array(self._device.read(logits)))
            left -= logits.shape[0]
            if not left:
                return

    def _find_recording(self, bucket: Bucket) -> _Recording:
        """Return the recording for a shape, the last one's if it is the same.

        Raises:
            MemoryError: it does not fit.
        """
        if self._made is None or self._made[0] != bucket:
            self._made = None
            self._pool.release()
            decoder, limit = self._loaded.decoder, self._device.binding_limit
            if bucket.rows > _bindable_rows(decoder, limit):
                raise MemoryError
            try:
                self._made = bucket, _record_forward(self._pool, decoder, bucket, limit)
            except OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
        return self._made[1]


def open_wgpu(
    model_dir: Path,
    dtype: str,
    compute: Compute,
    forward: ForwardSize,
    quantization: Quantization = "none",
) -> WgpuEngine:
    """Load a teacher on a Vulkan device.

    Raises:
        InputError: there is none, or the model cannot be loaded, or does not fit.
    """
    check_teacher_backend("wgpu", compute.backend, compute.gpu)
    config, layout = _freeze_all(model_dir, dtype, quantization, forward.length)
    with _open_device(model_dir, config, compute) as device:
        resident = _choose_layers(model_dir, config, layout, device, compute, forward)
        loaded = load_model(model_dir, config, layout, device, evaluates=True, resident=resident)
    return WgpuEngine(device, loaded)


def open_wgpu_generator(
    model_dir: Path,
    dtype: str,
    compute: Compute,
    batch: int,
    length: int,
    quantization: Quantization = "none",
) -> WgpuGenerator:
    """Load a teacher that writes answers on a Vulkan device.

    Args:
        batch: the most answers that are written together.
        length: tokens of the longest prompt with its answer.

    Raises:
        InputError: there is none, or the model cannot be loaded, or does not fit.
    """
    config, layout = _freeze_all(model_dir, dtype, quantization, length)
    config = compute.apply_storage(config)
    with _open_device(model_dir, config, compute) as device:
        return load_generator(
            model_dir, config, layout, None, device, longest=length, max_new_tokens=0, batch=batch
        )


@contextmanager
def _open_device(model_dir: Path, config: RunConfig, compute: Compute) -> Iterator[Device]:
    """Yield a device that computes a model; in the block its errors are the user's.

    Raises:
        InputError: there is none, or it fails.
    """
    try:
        check_vulkan_computes(model_dir, config)
        device = open_vulkan_device(compute.gpu, allow_software=compute.backend == "wgpu")
        log.info("the teacher is on wgpu:%s, %s", device.adapter.index, device.adapter.name)
        yield device
    except (UnusableError, DeviceError) as error:
        raise InputError(f"{model_dir}: on a Vulkan device: {error}; take another one") from None


def _freeze_all(
    model_dir: Path, dtype: str, quantization: Quantization, length: int
) -> tuple[RunConfig, GradientLayout]:
    """Return config and layout of a model of which nothing trains, with weights of a type."""
    settings = {
        "task": "causal-lm",
        "method": "lora",
        "model.path": str(model_dir),
        "model.dtype": dtype,
        "model.quantization": quantization,
        "data.train": "none",
        "data.max_seq_len": length,
    }
    return load_config(None, settings), lay_out_tensors([])


def _choose_layers(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    device: Device,
    compute: Compute,
    forward: ForwardSize,
) -> int | None:
    """Return the layers that stay beside a forward; None: all.

    Raises:
        InputError: not even one window fits.
    """
    length, limit = padded_length(forward.length), device.binding_limit

    def plan(tokens: int, resident: int | None) -> MemoryBudget:
        pool = MemoryPool(None)
        decoder = plan_decoder(model_dir, config, layout, pool, resident)
        rows = min(tokens, _bindable_rows(decoder, limit))
        if rows < length:
            raise InputError(
                f"{device.adapter.name}: a window of {length} tokens exceeds the {limit >> 20} MiB"
                " that a kernel's argument may span; lower --max-seq-len"
            )
        _record_forward(pool, decoder, Bucket(rows // length, length, classify=False), limit)
        return pool.report_budget()

    tokens = max(forward.tokens or BATCH["wgpu"], length)
    return choose_layers(
        model_dir,
        compute.resident,
        device,
        lambda _, some: plan(tokens, some),
        lambda some: plan(length, some),
    )


def _bindable_rows(decoder: Decoder, limit: int) -> int:
    """Return the most tokens whose widest activation is one kernel argument."""
    return limit // (4 * widest_activation(decoder.architecture))


def _record_forward(pool: MemoryPool, decoder: Decoder, bucket: Bucket, limit: int) -> _Recording:
    """Record a forward on the pool's device, or plan it without one."""
    graph, columns = Graph(pool.device, limit), decoder.architecture.vocab_size
    rows = logit_rows(bucket.chunk_rows, columns, limit)
    vector = pool.take((bucket.words,), "u32", purpose="input")
    table = decoder.take_table(pool, bucket.rows)
    logits = pool.take((rows, columns), purpose="logits")
    chunks = decoder.record_logits(graph, pool, bucket, vector, table, logits)
    return _Recording(graph, vector, table, logits, chunks)
