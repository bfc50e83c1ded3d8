"""The layers of a decoder over a group of micro-batches: each layer runs all of them in its turn.

A layer that is read at each use is then read once a direction for the whole group, and its
gradients are final at its turn in backward. Every gradient is the sum over micro-batches in their
order, as it is where one micro-batch after the other runs all layers: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.decoder import Backbone, within_samples


class LayerMajorOrder:
    """Forward and backward of groups.

    Between layers stand the hidden states of every micro-batch, and in backward their gradients. On
    an accelerator those of several micro-batches wait in the host's memory; their copies belong to
    the stream that computes, and the host waits for none.

    Args:
        recompute: a layer is computed again in its backward; else all of a group's activations are
            kept until then.
    """

    def __init__(self, backbone: Backbone, autocast: torch.autocast, *, recompute: bool) -> None:
        self._backbone, self._autocast, self._recompute = backbone, autocast, recompute
        self._parts: list[Any] = [backbone.embed_tokens, *backbone.layers]
        trains = [any(each.requires_grad for each in part.parameters()) for part in self._parts]
        self._first = trains.index(True) if any(trains) else len(trains)

    def run_group(
        self, micros: Sequence[MicroBatch], mark_backward: Callable[[bool], None]
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch with its final hidden states, before the last norm.

        With gradients the caller then runs the backward of its loss, and that of the layers follows
        the last one.

        Args:
            mark_backward: is called before each backward, with whether it is the group's last one
                of its parameters.
        """
        trains, last, device = torch.is_grad_enabled(), len(micros) - 1, micros[0].input_ids.device
        waits = device.type != "cpu" and last > 0

        def put_away(values: Tensor | None) -> Tensor | None:
            return values.to("cpu", non_blocking=True) if waits and values is not None else values

        values: list[Any] = [micro.input_ids for micro in micros]
        kept: list[list[Any]] = []
        for number in range(len(self._parts)):
            cells: list[Any] = []
            keeps = trains and number >= self._first
            for place, micro in enumerate(micros):
                start, end = self._compute_part(number, values[place], micro)
                if keeps:
                    cells.append(values[place] if self._recompute else (start, end))
                values[place] = put_away(end.detach())
                del start, end
            if keeps:
                kept.append(cells)
        for place, micro in enumerate(micros):
            hidden = values[place].to(device, non_blocking=True).detach()
            hidden.requires_grad_(trains and self._first < len(self._parts))
            if trains:
                mark_backward(place == last)
            yield replace(micro, hidden=hidden)
            values[place] = put_away(hidden.grad)
        while kept:
            cells = kept.pop()
            for place, micro in enumerate(micros):
                cell, cells[place] = cells[place], None
                if self._recompute:
                    cell = self._compute_part(self._first + len(kept), cell, micro)
                mark_backward(place == last)
                torch.autograd.backward(cell[1], values[place].to(device, non_blocking=True))
                values[place] = put_away(cell[0].grad)

    def _compute_part(
        self, number: int, values: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the embedding or a layer, and its output, with a graph between."""
        with self._autocast:
            if number == 0:
                return values, self._parts[0](values)
            hidden = values.to(micro.input_ids.device, non_blocking=True).detach()
            hidden.requires_grad_(number > self._first)
            positions = micro.positions
            rotation = self._backbone.compute_rotation(micro.input_ids, positions, hidden.dtype)
            mask = None if positions is None else within_samples(positions)
            return hidden, self._parts[number](hidden, rotation, mask)


def run_in_turn(
    micros: Sequence[MicroBatch], mark_backward: Callable[[bool], None]
) -> Iterator[MicroBatch]:
    """Yield each micro-batch as it is, for a caller that runs all layers in its loss.

    Args:
        mark_backward: as for `LayerMajorOrder.run_group`.
    """
    for place, micro in enumerate(micros, start=1):
        mark_backward(place == len(micros))
        yield micro
