"""Which stages a pipeline has, which process holds them, and torch's schedule that runs them.

A looped placement gives a process every p-th stage, and a V gives it one on the way down and its
mirror image on the way up, so that the first process holds the first stage and the last:

    interleaved, p = 2    rank 0: stages 0, 2    rank 1: stages 1, 3
    zbv                   rank 0: stages 0, 3    rank 1: stages 1, 2

Schedules: GPipe (Huang et al., arXiv 1811.06965), 1F1B and interleaved 1F1B (Narayanan et al.,
arXiv 2104.04473), ZBV (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from trainer.config.parallel import PipelineConfig
from trainer.replica.torch.decoder import Decoder


class Schedule(NamedTuple):
    """A schedule of torch, and what it asks of the stages."""

    build: Callable[..., Any]
    v_shaped: bool = False
    splits_backward: bool = False
    """Whether it computes the weights' gradients later than those of the activations."""


SCHEDULES = {
    "gpipe": Schedule(ScheduleGPipe),
    "1f1b": Schedule(Schedule1F1B),
    "interleaved": Schedule(ScheduleInterleaved1F1B),
    "zbv": Schedule(ScheduleZBVZeroBubble, v_shaped=True, splits_backward=True),
}


def place_stages(settings: PipelineConfig) -> list[int]:
    """Return which process of a pipeline holds each stage."""
    down = list(range(settings.stages))
    if SCHEDULES[settings.schedule].v_shaped:
        return down + down[::-1]
    return down * settings.stages_per_process


class Stage(nn.Module):
    """A part of the model as torch's schedules call it: a tensor in, a tensor out."""

    def __init__(self, part: Decoder, number: int, autocast: torch.autocast) -> None:
        super().__init__()
        self.part = part
        self.number = number
        self._autocast = autocast

    def forward(self, before: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return `[B, T, D]`, from token ids `[B, T]` in the first stage."""
        with self._autocast:
            return self.part.model(before, position_ids).last_hidden_state


class _ScheduledStage(PipelineStage):
    """A stage whose V can also run forward alone: torch 2.13 passes gradients on even then."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def make_schedule(
    kind: Schedule,
    stages: Sequence[Stage],
    count: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    group: ProcessGroup,
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return torch's schedule over a process's stages, for micro-batches of one shape.

    Shapes are given, not found out: torch would run a forward and a backward for that.

    Args:
        count: stages of all processes.
        shape: `(B, T, D)` of the activations between stages, of this dtype.
        loss: of the last stage's output and of a micro-batch's number, `[1]`.
    """
    device = next(stages[0].parameters()).device
    between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    ids = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    found = [
        _ScheduledStage(
            stage,
            stage.number,
            count,
            device,
            input_args=between if stage.number else ids,
            output_args=between,
            group=group,
            # A layer that is recomputed would be so again for each of its weights.
            dw_builder=_at_once if kind.splits_backward and stage.part.model.recompute else None,
        )
        for stage in stages
    ]
    return kind.build(
        found if len(found) > 1 else found[0], microbatches, loss_fn=loss, scale_grads=False
    )


def _at_once() -> Callable[[], None]:
    """Leave nothing to the later half of a backward that was split."""
    return lambda: None
