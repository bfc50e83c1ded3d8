"""Consecutive layers on different processes, which work on different micro-batches at a time.

Every process of a pipeline reads the same samples, so that only activations and their gradients
travel: the first stage takes the token ids, all take the positions of packed rows, and the last
one takes the targets. Micro-batches of a step have one shape, padded with samples that have no
target. Losses and gradients are sums over targets, so unequal micro-batches need no correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.model.layout import Block, GradientLayout
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.torch import objective
from trainer.replica.torch.batch import IGNORED, MicroBatch, collate
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.kd_loss import token_losses
from trainer.replica.torch.loader import base_dtype, load_model
from trainer.replica.torch.model import recompute_activations, trainable_parameters
from trainer.replica.torch.parallel.stages import (
    SCHEDULES,
    Stage,
    make_schedule,
    place_stages,
)
from trainer.replica.torch.precision import make_autocast

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_TABLE = "model.embed_tokens.weight"


class Pipeline:
    """This process's stages; every process of the mesh calls every method, in the same order.

    Args:
        mesh: has the dimensions `pipeline` and `data`.
        recompute: gradient checkpointing. A schedule that splits backward then no longer does.

    Raises:
        InputError: the model cannot be loaded, or not be split into stages.
    """

    def __init__(
        self,
        model_dir: Path,
        config: RunConfig,
        layout: GradientLayout,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        recompute: bool,
    ) -> None:
        settings, architecture = config.parallel.pipeline, read_architecture(model_dir)
        self._kind, self._microbatches = SCHEDULES[settings.schedule], settings.microbatch_count
        self._group, self._copies = mesh.get_group("pipeline"), mesh.get_group("data")
        self._device, self._width = device, architecture.hidden_size
        self._autocast = make_autocast(config, device)
        holders = place_stages(settings)
        self._count, self._last_rank = len(holders), holders[-1]
        layers = split_layers(layout.num_layers, self._count)
        self._stages: list[Stage] = []
        for number, holder in enumerate(holders):
            if holder == mesh.get_local_rank("pipeline"):
                part = cast("Decoder", load_model(model_dir, config, device, layers[number]))
                if recompute:
                    recompute_activations(part)
                self._stages.append(Stage(part, number, self._autocast))
        self._dtype = base_dtype(config)
        tied = architecture.tied and config.num_classes is None
        found = _trainable_parameters(self._stages, tied=tied)
        self.parameters = {
            slot.name: found.pop(slot.name) for slot in layout.iter_tensors() if slot.name in found
        }
        """This process's part of the trainable tensors, by their layout names."""
        assert not found, f"the layout does not have {found.keys()}"
        first_copy = mesh.mesh[:, 0, 0].tolist()
        self.owners = {
            slot.name: first_copy[holders[_find_stage(block, layers)]]
            for block in layout.blocks
            for slot in block.tensors
        }
        """A rank that holds each trainable tensor, by its layout name."""
        self._gradient = _flatten_parameters(self.parameters)
        self._gradients = self._gradient.split([part.numel() for part in self.parameters.values()])
        shared = tied and holders[0] != holders[-1] and _TABLE in self.parameters
        self.copied = [_TABLE] if shared else []
        """Parameters of both the first stage and the last: a tied embedding that is trained."""
        self._schedule: Any = None
        self._shape = (0, 0)
        self._micros: list[MicroBatch] = []
        self._scale = 1.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._cells = torch.zeros((config.num_classes or 0) ** 2, dtype=torch.int64, device=device)

    def group_microbatches(
        self, rows: Sequence[Sequence[Encoded]], limit: MicroBatchLimit
    ) -> list[MicroBatch]:
        """Return rows as what the schedule runs at a time: micro-batches of one shape, together.

        Args:
            rows: one sample each, or several.
            limit: of one micro-batch.
        """
        order = sorted(
            rows, key=lambda row: -_count_tokens(row)
        )  # rows of a round have similar lengths
        found: list[MicroBatch] = []
        while order:
            fitting = min(limit.samples, limit.tokens // _count_tokens(order[0]))
            each = max(1, min(fitting, -(-len(order) // self._microbatches)))
            taken, order = order[: each * self._microbatches], order[each * self._microbatches :]
            missing = each * self._microbatches - len(taken)
            found.append(collate([*taken, *[[_padding_sample(taken[0][0])]] * missing]))
        return found

    def train_groups(self, rounds: Sequence[MicroBatch], scale: float) -> Tensor:
        """Leave the gradient of the losses' sum over all copies, times `scale`, in `grad`.

        Returns:
            The sum of this copy's losses, fp64 `[]`.
        """
        self._gradient.zero_()
        for parameter, part in zip(self.parameters.values(), self._gradients, strict=True):
            parameter.grad = part.view(parameter.shape)
        self._loss_sum.zero_()
        for batch in rounds:
            self._run_schedule(batch, scale)
        dist.all_reduce(self._gradient, group=self._copies)
        for name in self.copied:
            self._reduce_tied(self.parameters[name])
        dist.broadcast(self._loss_sum, group=self._group, group_src=self._last_rank)
        return self._loss_sum

    def score_groups(self, rounds: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Return this copy's sum of losses `[]`, and a classifier's confusion `[classes^2]`."""
        self._loss_sum.zero_()
        self._cells.zero_()
        with torch.no_grad():
            for batch in rounds:
                self._run_schedule(batch, None)
        for sums in (self._loss_sum, self._cells):
            dist.broadcast(sums, group=self._group, group_src=self._last_rank)
        return self._loss_sum, self._cells

    def _run_schedule(self, batch: MicroBatch, scale: float | None) -> None:
        """Run the schedule; without a scale forward alone."""
        if self._stages[-1].number == self._count - 1:
            parts = _split_microbatch(batch, self._microbatches)
            self._micros = [part.to(self._device) for part in parts]
        self._scale = scale or 0.0
        rows, columns = batch.input_ids.shape
        schedule = self._make_schedule((rows // self._microbatches, columns))
        ids = ()
        if self._stages[0].number == 0:
            ids = (batch.input_ids.to(self._device, non_blocking=True),)
        named = {}
        if batch.positions is not None:
            named["position_ids"] = batch.positions.to(self._device, non_blocking=True)
        run = schedule.eval if scale is None else schedule.step
        run(*ids, target=torch.arange(self._microbatches), return_outputs=False, **named)

    def _add_loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """Add a micro-batch's losses up, and return what has their gradient to `hidden`.

        The head's backward runs here: its gradient, `[V, D]`, would otherwise wait for each
        micro-batch in flight, and a schedule that splits backward would ask for it twice.
        """
        trains = torch.is_grad_enabled()
        leaf = hidden.detach().requires_grad_(trains)
        micro = self._micros[int(number)]
        targets = micro.targets
        part = self._stages[-1].part
        if targets is None:
            loss, logits = objective.class_loss(leaf, part.score, micro)
            if not trains:
                objective.count_cells(self._cells, micro.labels, logits)
        else:
            with self._autocast:
                needed = leaf[targets.rows, targets.places]
                product = objective.biased_product(needed, part.lm_head)
                loss = token_losses(*product, targets.wanted).loss
        self._loss_sum += loss.detach()
        if not trains:
            return loss
        (loss * self._scale).backward()
        assert leaf.grad is not None
        return (hidden * leaf.grad).sum()

    def _make_schedule(self, shape: tuple[int, int]) -> Any:
        """Return the schedule for micro-batches `[B, T]`: a new one if the shape has changed."""
        if self._shape != shape:
            self._shape = shape
            self._schedule = make_schedule(
                self._kind,
                self._stages,
                self._count,
                (*shape, self._width),
                self._dtype,
                self._group,
                self._microbatches,
                self._add_loss,
            )
        return self._schedule

    def _reduce_tied(self, parameter: nn.Parameter) -> None:
        """Add up the gradients of the embedding and of the head that is its copy.

        Both stages add the same two numbers, so the copies stay equal.
        """
        mine = parameter.grad
        assert mine is not None
        theirs = torch.empty_like(mine)
        ranks = dist.get_process_group_ranks(self._group)
        other = ranks[0] if dist.get_rank() == ranks[-1] else ranks[-1]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, other, self._group),
                dist.P2POp(dist.irecv, theirs, other, self._group),
            ]
        )
        for work in works:
            work.wait()
        mine += theirs


def _trainable_parameters(stages: Sequence[Stage], *, tied: bool) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a process by their layout names.

    A process that holds both a tied embedding and the head gets one weight for them.
    """
    first, last = stages[0].part, stages[-1].part
    if tied and first.model.embed_tokens is not None and last.model.norm is not None:
        last.lm_head.weight = first.model.embed_tokens.weight  # pyright: ignore[reportAttributeAccessIssue]
    return {
        _TABLE if tied and name == "lm_head.weight" else name: parameter
        for stage in stages
        for name, parameter in trainable_parameters(stage.part)
    }


def _flatten_parameters(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Make the parameters views of one fp32 tensor, and return zeros like it for gradients."""
    weights = torch.cat([part.detach().float().flatten() for part in parameters.values()])
    views = weights.split([part.numel() for part in parameters.values()])
    for parameter, view in zip(parameters.values(), views, strict=True):
        parameter.data = view.view(parameter.shape)
    return torch.zeros_like(weights)


def _find_stage(block: Block, layers: Sequence[range]) -> int:
    """Return the stage that holds a block of the layout."""
    if not block.is_layer:
        return 0 if block.name == "embedding" else len(layers) - 1
    number = int(block.name.removeprefix("layers."))
    return next(stage for stage, held in enumerate(layers) if number in held)


def _split_microbatch(whole: MicroBatch, parts: int) -> Iterator[MicroBatch]:
    rows = len(whole.lengths) // parts
    for start in range(0, parts * rows, rows):
        part = slice(start, start + rows)
        yield MicroBatch(
            whole.input_ids[part],
            whole.lengths[part],
            whole.labels[part],
            None if whole.positions is None else whole.positions[part],
        )


def _count_tokens(row: Sequence[Encoded]) -> int:
    return sum(len(sample.input_ids) for sample in row)


def _padding_sample(like: Encoded) -> Encoded:
    """Return a sample of one token without a target."""
    labels = IGNORED if isinstance(like.labels, int) else np.array([IGNORED], np.int32)
    return type(like)(np.zeros(1, np.int32), labels)


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as evenly as possible.

    The first stage also computes the embedding and the last one the head: of layers that are left
    over they get one only if every stage between them has one, and the last stage never.
    """
    least, left = divmod(num_layers, stages)
    assert least, f"{num_layers} layers are too few for {stages} stages"
    # Later stages keep the activations of fewer micro-batches, so they come first.
    with_one_more = [*range(stages - 2, 0, -1), 0][:left]
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + least + (stage in with_one_more))
    return [range(*pair) for pair in pairwise(bounds)]
