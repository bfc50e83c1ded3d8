"""The wgpu replica, on any GPU with Vulkan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from trainer.config.capabilities import check_capability
from trainer.config.run import RunConfig
from trainer.model.layout import GradientLayout
from trainer.planning.resident_layers import describe_residents
from trainer.planning.vulkan import SLOTS
from trainer.planning.vulkan_buffers import padded_length
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.replica.microbatch import split_by_length
from trainer.replica.sampling import Sampling
from trainer.replica.wgpu.batch import PackedBatch, pack_samples
from trainer.replica.wgpu.engine import Engine
from trainer.replica.wgpu.generation.generator import WgpuGenerator
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError
from trainer.replica.wgpu.layer_major import Member
from trainer.replica.wgpu.loaded_model import load_model
from trainer.replica.wgpu.planning import plan_replica
from trainer.replica.wgpu.weights.slots import Slots
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded


class WgpuReplica:
    """A Replica of `trainer.replica.base`.

    Weights are undefined until the first `write_trainable`, except where a full model `evaluates`.

    Products have fp32 factors and sums. Layers are computed twice as
    `training.gradient_checkpointing` says; `auto`: only if one sample does not fit otherwise.

    Raises:
        InputError: the engine does not compute the model, or it does not fit.
        DeviceError: the device fails.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        device: Device,
        *,
        evaluates: bool = False,
    ) -> None:
        """`evaluates`: nothing is trained."""
        self.layout = layout
        self.device = f"wgpu:{device.adapter.index}"
        self._config = config
        self._device = device
        check_capability(config, "wgpu")
        planned = plan_replica(model_dir, config, layout, device, evaluates=evaluates)
        self._loaded = load_model(
            model_dir, config, layout, device, evaluates=evaluates, resident=planned.resident
        )
        self._engine = Engine(
            device,
            self._loaded.decoder,
            keep=not planned.recompute,
            uploads=self._loaded.uploads,
        )
        layers = self._loaded.decoder.architecture.num_layers
        self.residents = (
            "" if planned.resident is None else describe_residents(planned.resident, layers)
        )
        """How many layers of the base stay on the device, in words; empty if all do."""
        self._readback = Readback(device, self._loaded.slots, self._loaded.gradients)
        self.limit, self.group_tokens = planned.limit, planned.group_tokens
        """The limits of a micro-batch and of a group, which shrink if the device runs out of
        memory."""

    def write_trainable(self, flat: np.ndarray) -> None:
        """Copy fp32 `[layout.size]` into the trainable weights."""
        self._loaded.write(self._device, flat)

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Run one shard; see `Replica.forward_backward`.

        Raises:
            InputError: a soft target has a rest, or a layer that is not resident cannot be read.
        """
        start = time.monotonic()
        shares = self._loss_weights(batch, alpha)
        _, micros, groups = self._prepare_groups(batch, shares, training=True)
        self._device.clear(self._loaded.gradients)
        try:
            for part in self._engine.submit_parts(groups, self._copy_blocks):
                self._readback.map_blocks(self._list_final(part))
                if self._loaded.uploads is not None:
                    self._readback.hand_out(on_block, ahead=SLOTS)
            if not groups:
                self._readback.submit_all()
            self._readback.hand_out(on_block)
        finally:
            self._readback.cancel()
        weight = sum(micro.weight for micro in micros)
        tokens = sum(len(sample.input_ids) for sample in batch)
        result = self._engine.wait_for_result()
        seconds = time.monotonic() - start
        if shares is None:
            return StepResult(result.loss, weight, tokens, seconds)
        kl = result.taught - sum(micro.entropy for micro in micros)
        loss = shares[0] * result.loss + shares[1] * kl
        return StepResult(loss, weight, tokens, seconds, ce_sum=result.loss, kl_sum=kl)

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass; see `Replica.evaluate`."""
        order, micros, groups = self._prepare_groups(batch, None, training=False)
        for _ in self._engine.submit_parts(groups):
            pass
        result = self._engine.wait_for_result()
        weight = sum(micro.weight for micro in micros)
        classes = self._config.num_classes
        if classes is None:
            return EvalResult(result.loss, weight, None)
        confusion = np.zeros((classes, classes), np.int64)
        labels = np.array([batch[index].labels for index in order], np.int64)
        np.add.at(confusion, (labels, result.predictions[: len(order)].astype(np.int64)), 1)
        return EvalResult(result.loss, weight, confusion.tolist())

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Return the likeliest new tokens of each prompt; see `Replica.answer`."""
        self._engine.free_memory()  # activations make room for keys and values
        made = WgpuGenerator(self._device, self._loaded.decoder, self._loaded.uploads)
        try:
            greedy = Sampling()
            return made.generate(prompts, max_new_tokens=new_tokens, sampling=greedy, stop=stop)
        finally:
            made.release()

    def _loss_weights(
        self, batch: Sequence[Encoded], alpha: float | None
    ) -> tuple[float, float] | None:
        """Return the weights of cross-entropy and divergence; None if no teacher counts."""
        distillation = self._config.distillation
        if distillation is None or not batch or batch[0].soft is None:
            return None
        alpha = distillation.alpha if alpha is None else alpha
        return (1 - alpha, alpha * distillation.temperature**2) if alpha else None

    def _copy_blocks(self, encoder: Any, part: str) -> None:
        for index in self._list_final(part):
            self._readback.encode(encoder, index)

    def _list_final(self, part: str) -> list[int]:
        """Return the blocks that leave after a part: its layer's, and the others at the end."""
        name, _, number = part.partition(".")
        layer = f"layers.{number}" if name == "backward" else None
        return [
            index
            for index in self.layout.send_order
            if (block := self.layout.blocks[index]).name == layer
            or (part == "embedding" and not block.is_layer)
        ]

    def _prepare_groups(
        self, batch: Sequence[Encoded], shares: tuple[float, float] | None, *, training: bool
    ) -> tuple[list[int], list[PackedBatch], list[list[Member]]]:
        """Return the samples' order, micro-batches and groups, smaller ones if memory is short.

        Raises:
            InputError: not even one sample fits.
        """
        lengths = [padded_length(len(sample.input_ids)) for sample in batch]
        while True:
            split = split_by_length(lengths, self.limit)
            weights = self._config.training.class_weights if training else None
            micros = [
                pack_samples([batch[index] for index in some], shares, weights) for some in split
            ]
            try:
                groups = self._engine.prepare_groups(micros, self.group_tokens, training=training)
            except OutOfMemoryError as error:
                buckets = [micro.bucket for micro in micros]
                if self._shrink_group([bucket.rows for bucket in buckets]):
                    continue
                several = [bucket for bucket in buckets if bucket.samples > 1]
                largest = max(several or buckets, key=lambda bucket: bucket.rows)
                smaller = self.limit.halve_limit(largest.samples, largest.rows)
                if smaller is None:
                    raise InputError(
                        f"{error}; one sample of {largest.length} tokens does not fit: lower"
                        " data.max_seq_len or set model.quantization nf4"
                    ) from None
                self.limit = smaller
                self._engine.free_memory()
            else:
                return [index for some in split for index in some], micros, groups

    def _shrink_group(self, rows: Sequence[int]) -> bool:
        """Halve the tokens of a group; return whether there was more than one micro-batch in one.

        Args:
            rows: tokens of each micro-batch.
        """
        together = min(self.group_tokens, sum(rows))
        if self._loaded.uploads is None or together <= max(rows):
            return False
        self.group_tokens = together // 2
        self._engine.free_memory()
        return True


class Readback:
    """Host-visible memory for every block.

    Args:
        blocks: the gradients on the device, padded by `slots`.
    """

    def __init__(self, device: Device, slots: Slots, blocks: list[Array]) -> None:
        self._device = device
        self._slots = slots
        self._blocks = blocks
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        self._staging = [device.create_buffer(block.nbytes, usage) for block in blocks]
        self._mapping: deque[tuple[int, Callable[[], memoryview]]] = deque()
        """The blocks on their way, each with what waits for it."""

    def encode(self, encoder: Any, index: int) -> None:
        """Encode the copy of a final block."""
        block, staging = self._blocks[index], self._staging[index]
        encoder.copy_buffer_to_buffer(block.buffer, block.offset, staging, 0, block.nbytes)

    def submit_all(self) -> None:
        """Copy every block now."""
        encoder = self._device.create_encoder()
        for index in range(len(self._blocks)):
            self.encode(encoder, index)
        self._device.submit(encoder)
        self.map_blocks(self._slots.layout.send_order)

    def map_blocks(self, indices: Iterable[int]) -> None:
        """Begin to map blocks whose copies were submitted; they are handed out in this order."""
        for index in indices:
            self._mapping.append((index, self._device.map_submitted(self._staging[index])))

    def hand_out(self, on_block: OnBlock, ahead: int = 0) -> None:
        """Wait for all mapped blocks but the last `ahead`, each in turn."""
        while len(self._mapping) > ahead:
            index, wait = self._mapping.popleft()
            try:
                mapped = np.frombuffer(wait(), np.float32)
                gradient = self._slots.unpad_block(index, mapped[: self._blocks[index].size])
            finally:
                self._device.unmap_buffer(self._staging[index])
            on_block(index, gradient)

    def cancel(self) -> None:
        """Hand out no more of this step."""
        while self._mapping:
            self._device.unmap_buffer(self._staging[self._mapping.popleft()[0]])
