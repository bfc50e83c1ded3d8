"""One rank's part of a model that several processes train together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from trainer.config.capabilities import check_capability
from trainer.config.run import RunConfig
from trainer.model.initialization import initial_tensor
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_headers
from trainer.planning.replica import BUSY_TOKENS, CPU_TOKENS
from trainer.replica.base import EvalResult, StepResult
from trainer.replica.microbatch import MicroBatchLimit, pack_rows, split_by_length
from trainer.replica.torch import objective
from trainer.replica.torch.batch import IGNORED, MicroBatch, collate
from trainer.replica.torch.model import parameters_by_slot
from trainer.replica.torch.parallel import flat_vector
from trainer.replica.torch.parallel.collectives import all_gather
from trainer.replica.torch.parallel.parallelize import parallelize
from trainer.replica.torch.parallel.tensor_parallel import sum_gradients
from trainer.replica.torch.precision import SCALE_OF_MEAN, LossScale
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_UNBOUNDED = 1 << 62


def check_torch(config: RunConfig, copies: int) -> None:
    """Refuse what torch before 2.13 cannot do; the rest is tested with 2.11, too.

    Raises:
        InputError: a pipeline, or NF4 weights that FSDP is to divide among copies of the model.
    """
    divided = copies > 1 and config.parallel.data == "fsdp" and config.model.quantization == "nf4"
    if config.parallel.pipeline.stages > 1:
        what = "a pipeline"
    elif divided:
        what = "fsdp with model.quantization nf4"
    else:
        return
    if TorchVersion(torch.__version__) < "2.13":
        raise InputError(f"{what} needs torch 2.13 or newer; here is {torch.__version__}")


class ParallelReplica:
    """This rank's part of the model; every rank of the mesh calls every method, in the same order.

    Args:
        mesh: of `mesh.make_mesh`.
        weights: the trainable weights to start from, fp32 `[layout.size]`; None for those of
            `initial_weights`, of which each rank then makes one tensor at a time.
        recompute: gradient checkpointing.

    Raises:
        InputError: the model cannot be loaded, or not be cut.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        mesh: DeviceMesh,
        device: torch.device,
        weights: np.ndarray | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        check_capability(config, "ddp")  # what no strategy knows
        check_torch(config, mesh["data"].size())
        self.layout = layout
        self._config, self._device, self._mesh = config, device, mesh
        self.copies = mesh["data"].size()
        """Copies of the model, which work on different samples."""
        self._scale = LossScale(config, device, SCALE_OF_MEAN, dist.group.WORLD)
        self._pipeline = None
        if config.parallel.pipeline.stages > 1:
            from trainer.replica.torch.parallel.pipeline import Pipeline  # takes a second

            self._pipeline = Pipeline(model_dir, config, layout, mesh, device, recompute=recompute)
            self.parameters = self._pipeline.parameters
        else:
            self._module: Any
            self._module, model, summed = parallelize(
                model_dir, config, mesh, device, recompute=recompute
            )
            self.parameters = parameters_by_slot(model, layout)
            """This rank's part of the trainable tensors by their layout names."""
            inside = {id(p) for name, p in model.named_parameters() if name in summed}
            self._summed = [part for part in self.parameters.values() if id(part) in inside]
        if weights is not None:
            self.write_trainable(weights)
            return
        headers, seed = read_headers(model_dir), config.training.seed
        flat_vector.scatter_tensors(layout, partial(initial_tensor, headers, seed), self.parameters)

    def local_samples(self, samples: int) -> range:
        """Return which of a step's samples this rank's copy of the model takes: a near-equal part.

        Ranks that hold one copy together take the same.
        """
        return self._copy_samples(samples, self._mesh.get_local_rank("data"))

    def samples_by_copy(self, start: int, stop: int) -> list[list[int]]:
        """Return each copy's first rank and its part of the samples `start..stop`."""
        first = self._mesh.mesh[0, :, 0].tolist()
        parts = (self._copy_samples(stop - start, copy) for copy in range(self.copies))
        return [
            [rank, start + part.start, start + part.stop]
            for rank, part in zip(first, parts, strict=True)
        ]

    def _copy_samples(self, samples: int, copy: int) -> range:
        return range(samples * copy // self.copies, samples * (copy + 1) // self.copies)

    @property
    def copy_counts(self) -> dict[str, int]:
        """The number of ranks that hold the same part, by tensor."""
        ranks = self._mesh["data"].size() * self._mesh["tensor"].size()
        found = {
            name: ranks // flat_vector.part_count(part) for name, part in self.parameters.items()
        }
        if self._pipeline is not None:
            found |= dict.fromkeys(self._pipeline.copied, 2 * ranks)
        return found

    def accumulate(self, batch: Sequence[Encoded]) -> StepResult:
        """Leave the gradient of the mean loss over all ranks' batches in the parameters' `grad`.

        Returns:
            The sums over all copies.
        """
        began = time.monotonic()
        micros = self._micro_batches(batch)
        # Every rank runs as many micro-batches as the longest, since they gather and reduce
        # together, and knows what the mean divides by before its first backward.
        weight, rounds = self._agree_on_groups(_sum_weights(micros), len(micros))
        while True:
            factor = self._scale.value / max(weight, 1)
            if self._pipeline is None:
                loss_sum = self._train_microbatches(micros, rounds, factor)
            else:
                loss_sum = self._pipeline.train_groups(micros, factor)
            gradients = (part.grad for part in self.parameters.values())
            mine = [flat_vector.local_part(part) for part in gradients if part is not None]
            if self._scale.unscale_gradients(mine, loss_sum):
                break
        tokens = loss_sum.new_full((), sum(len(sample.input_ids) for sample in batch))
        sums = torch.stack([loss_sum, tokens])
        dist.all_reduce(sums, group=self._mesh.get_group("data"))
        total, count = sums.tolist()
        return StepResult(total, weight, int(count), time.monotonic() - began)

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass over this rank's samples and return the sums over all ranks."""
        classes = self._config.num_classes
        micros = self._micro_batches(batch)
        weight, rounds = self._agree_on_groups(_sum_weights(micros), len(micros))
        if self._pipeline is None:
            loss_sum, cells = self._score_microbatches(micros, rounds)
        else:
            loss_sum, cells = self._pipeline.score_groups(micros)
        group = self._mesh.get_group("data")
        dist.all_reduce(loss_sum, group=group)
        dist.all_reduce(cells, group=group)
        confusion = None if classes is None else cells.view(classes, classes).tolist()
        return EvalResult(float(loss_sum), weight, confusion)

    def gather_gradient(self) -> np.ndarray | None:
        """Return the mean gradient `[layout.size]` on rank 0, None on the others."""
        return self.gather_parameters({name: part.grad for name, part in self.parameters.items()})

    def gather_parameters(self, parts: Mapping[str, Tensor | None]) -> np.ndarray | None:
        """Return the parameters, or tensors with their names and shapes, in the same way."""
        return flat_vector.gather_vector(self.layout, parts, self._owners)

    def iterate_parameters(self, parts: Mapping[str, Tensor | None]) -> Iterator[np.ndarray | None]:
        """Yield them one at a time, as rank 0 has memory for."""
        return flat_vector.iterate_gathered(self.layout, parts, self._owners)

    @property
    def _owners(self) -> Mapping[str, int] | None:
        return None if self._pipeline is None else self._pipeline.owners

    def write_trainable(self, weights: np.ndarray) -> None:
        """Copy fp32 `[layout.size]`, the same on every rank, into the trainable weights."""
        assert weights.shape == (self.layout.size,), f"{weights.shape}: not {self.layout.size}"
        flat_vector.scatter_tensors(
            self.layout, lambda slot: weights[slot.start : slot.stop], self.parameters
        )

    def _train_microbatches(
        self, micros: Sequence[MicroBatch], rounds: int, scale: float
    ) -> Tensor:
        """Return this copy's sum of losses; leave the gradient of all, times `scale`, in `grad`."""
        self._clear_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for number in range(rounds):
            micro = micros[number] if number < len(micros) else self._padding_microbatch()
            with self._reduce_last_backward(number == rounds - 1):
                loss, _ = self._module(micro.to(self._device))
                # DDP and FSDP divide by the number of copies; what is wanted is the sum.
                (loss * (self.copies * scale)).backward()
            loss_sum += loss.detach()
        gradients = [part.grad for part in self._summed if part.grad is not None]
        sum_gradients(list(map(flat_vector.local_part, gradients)), self._mesh.get_group("tensor"))
        return loss_sum

    def _clear_gradients(self) -> None:
        """Drop the last step's gradients; DDP's stay in its buckets, as zeros.

        Without one there, `no_sync` would keep a gradient of its own beside the buckets.
        """
        is_ddp = isinstance(self._module, DistributedDataParallel)
        if is_ddp and all(part.grad is None for part in self.parameters.values()):
            for _again in range(2):  # DDP rebuilds its buckets after the first backward
                loss, _ = self._module(self._padding_microbatch().to(self._device))
                loss.backward()
        for parameter in self.parameters.values():
            if is_ddp and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def _score_microbatches(
        self, micros: Sequence[MicroBatch], rounds: int
    ) -> tuple[Tensor, Tensor]:
        """Return this copy's sum of losses, and a classifier's confusion `[classes^2]`."""
        classes = self._config.num_classes
        cells = torch.zeros((classes or 0) ** 2, dtype=torch.int64, device=self._device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for number in range(rounds):
                micro = micros[number] if number < len(micros) else self._padding_microbatch()
                micro = micro.to(self._device)
                loss, logits = self._module(micro)
                loss_sum += loss
                if classes is not None:
                    objective.count_cells(cells, micro.labels, logits)
        return loss_sum, cells

    def _agree_on_groups(self, weight: int, rounds: int) -> tuple[int, int]:
        """Return the sum of all copies' weights and the most rounds of any."""
        mine = torch.tensor([weight, rounds]).to(self._device, non_blocking=True)
        every = mine.new_empty(2 * self.copies)
        all_gather(every, mine, group=self._mesh.get_group("data"))
        counts = every.tolist()
        return sum(counts[::2]), max(counts[1::2])

    def _reduce_last_backward(self, last: bool) -> AbstractContextManager[None]:
        """Let DDP reduce gradients in the last backward of a step alone.

        FSDP reduces in each: the whole gradient, kept in between, is the memory that it saves.
        """
        if isinstance(self._module, DistributedDataParallel) and not last:
            return self._module.no_sync()
        return nullcontext()

    def _micro_batches(self, batch: Sequence[Encoded]) -> list[MicroBatch]:
        lengths = [len(sample.input_ids) for sample in batch]
        rows = [[index] for index in range(len(batch))]
        if self._config.training.pack:
            rows = pack_rows(lengths, self._config.data.max_seq_len)
        if self._pipeline is not None:
            samples = [[batch[index] for index in row] for row in rows]
            return self._pipeline.group_microbatches(samples, self._agree_on_limit())
        widths = [sum(lengths[index] for index in row) for row in rows]
        return list(
            self._collate_rows(batch, rows, split_by_length(widths, self._agree_on_limit()))
        )

    def _collate_rows(
        self,
        batch: Sequence[Encoded],
        rows: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
    ) -> Iterator[MicroBatch]:
        for group in groups:
            yield self._pad_columns(
                collate([[batch[index] for index in rows[row]] for row in group])
            )

    def _pad_columns(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch with as many columns as ranks that share tokens can divide."""
        ranks = self._config.parallel.tensor if self._config.parallel.sequence else 1
        width = -micro.input_ids.shape[1] % ranks
        if not width:
            return micro
        labels, positions = micro.labels, micro.positions
        if labels.ndim == 2:
            labels = F.pad(labels, (0, width), value=IGNORED)
        if positions is not None:  # samples of their own
            positions = F.pad(positions, (0, width))
        ids = F.pad(micro.input_ids, (0, width))
        return replace(micro, input_ids=ids, labels=labels, positions=positions)

    def _agree_on_limit(self) -> MicroBatchLimit:
        """Return the limit of a micro-batch, the same on every rank."""
        wanted = self._config.training.micro_batch_size
        if wanted == "auto":
            tokens = CPU_TOKENS if self._device.type == "cpu" else BUSY_TOKENS
            return MicroBatchLimit(_UNBOUNDED, tokens)
        return MicroBatchLimit(wanted, _UNBOUNDED)

    def _padding_microbatch(self) -> MicroBatch:
        """Return a micro-batch without a target: its loss and gradient are zero."""
        ids, classes = torch.zeros((1, 1), dtype=torch.int64), self._config.num_classes
        labels = torch.full((1,) if classes else (1, 1), IGNORED)
        return self._pad_columns(MicroBatch(ids, torch.ones(1, dtype=torch.int64), labels))


def _sum_weights(micros: Sequence[MicroBatch]) -> int:
    """Return the number of samples of a classifier, or of valid target tokens."""
    return sum(int(torch.count_nonzero(micro.labels != IGNORED)) for micro in micros)
