"""The layers of a decoder over a group of micro-batches: each layer runs all of them in its turn.

A layer that is read at each use is then read once a direction for the whole group, and its
gradients are final at its turn in backward. Every gradient is the sum over micro-batches in their
order, as it is where one micro-batch after the other runs all layers: the bits are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.decoder import Backbone, Decoder, within_samples
from trainer.replica.torch.model import recompute_activations
from trainer.replica.torch.published_parts import InseparableLayersError, PublishedParts

log = logging.getLogger(__name__)


class Parts(Protocol):
    """A model without its head, in parts of which each takes what the one before it returned."""

    layers: Sequence[nn.Module]
    trains_embedding: bool
    """A parameter before the layers trains."""

    def embed_tokens(self, micro: MicroBatch) -> tuple[Tensor, Sequence[Any]]:
        """Return the first layer's input `[B, T, D]`, and what else each layer is called with."""
        ...

    def run_layer(self, number: int, hidden: Tensor, call: Any) -> Tensor:
        """Return a layer's output `[B, T, D]`; `call` is what `embed_tokens` returned for it."""
        ...

    def run_remainder(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the final hidden states `[B, T, D]` from the last layer's output."""
        ...


class DecoderParts:
    """The parts of Motley's own decoder."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.layers: Sequence[Any] = list(backbone.layers)
        embedding: Any = backbone.embed_tokens
        self._embedding, self._norm = embedding, backbone.norm
        self.trains_embedding = any(each.requires_grad for each in embedding.parameters())

    def embed_tokens(self, micro: MicroBatch) -> tuple[Tensor, Sequence[Any]]:
        """Return the tokens' rows; a layer needs no more than the micro-batch."""
        return self._embedding(micro.input_ids), [micro] * len(self.layers)

    def run_layer(self, number: int, hidden: Tensor, call: MicroBatch) -> Tensor:
        """Return a layer's output `[B, T, D]`."""
        positions = call.positions
        rotation = self._backbone.compute_rotation(call.input_ids, positions, hidden.dtype)
        mask = None if positions is None else within_samples(positions)
        return self.layers[number](hidden, rotation, mask)

    def run_remainder(self, hidden: Tensor, micro: MicroBatch) -> Tensor:  # noqa: ARG002 - as Parts has it
        """Return the normalised hidden states."""
        assert self._norm is not None
        return self._norm(hidden)


class LayerMajorOrder:
    """Forward and backward of groups.

    Between layers stand the hidden states of every micro-batch, and in backward their gradients. On
    an accelerator those of several micro-batches wait in the host's memory; their copies belong to
    the stream that computes, and the host waits for none.

    Args:
        recompute: a layer is computed again in its backward; else all of a group's activations are
            kept until then.
    """

    def __init__(self, parts: Parts, autocast: torch.autocast, *, recompute: bool) -> None:
        self._parts, self._autocast, self._recompute = parts, autocast, recompute
        trains = [parts.trains_embedding]
        trains += [any(each.requires_grad for each in one.parameters()) for one in parts.layers]
        self._first = trains.index(True) if any(trains) else len(trains)
        """The first part that trains: the embedding is 0, and layers follow."""

    def run_group(
        self, micros: Sequence[MicroBatch], mark_backward: Callable[[bool], None]
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch with its final hidden states.

        With gradients the caller then runs the backward of its loss, and that of the layers follows
        the last one.

        Args:
            mark_backward: is called before each backward, with whether it is the group's last one
                of its parameters.
        """
        trains, last, device = torch.is_grad_enabled(), len(micros) - 1, micros[0].input_ids.device
        waits = device.type != "cpu" and last > 0

        def put_away(values: Any) -> Any:
            return values.to("cpu", non_blocking=True) if waits and values is not None else values

        def bring_back(values: Any) -> Any:
            return tree_map_only(Tensor, lambda each: each.to(device, non_blocking=True), values)

        def compute(number: int, values: Any, place: int) -> tuple[Any, Tensor]:
            """Return a part's input and output, with a graph between."""
            if number == 0:
                return None, self._embed_tokens(micros[place])[0]
            hidden = bring_back(values).detach().requires_grad_(number > self._first)
            call = bring_back(calls[place][number - 1])
            with self._autocast:
                found = self._parts.run_layer(number - 1, hidden, call)
            return hidden, found

        values: list[Any] = []
        calls: list[Sequence[Any]] = []
        kept: list[list[Any]] = [[]] if trains and self._first == 0 else []
        for micro in micros:
            start, found = self._embed_tokens(micro)
            if kept:
                kept[0].append(None if self._recompute else (None, start))
            values.append(put_away(start.detach()))
            calls.append(tree_map_only(Tensor, cache(put_away), found))  # layers have the same ones
            del start, found
        for number in range(1, 1 + len(self._parts.layers)):
            cells: list[Any] = []
            keeps = trains and number >= self._first
            for place in range(len(micros)):
                start, end = compute(number, values[place], place)
                if keeps:
                    cells.append(values[place] if self._recompute else (start, end))
                values[place] = put_away(end.detach())
                del start, end
            if keeps:
                kept.append(cells)
        for place, micro in enumerate(micros):
            hidden = bring_back(values[place]).detach().requires_grad_(trains and bool(kept))
            if trains:
                mark_backward(place == last)
            with self._autocast:
                final = self._parts.run_remainder(hidden, micro)
            yield replace(micro, hidden=final)
            del final
            values[place] = put_away(hidden.grad)
        while kept:
            cells = kept.pop()
            for place in range(len(micros)):
                cell, cells[place] = cells[place], None
                if self._recompute:
                    cell = compute(self._first + len(kept), cell, place)
                start, end = cell
                mark_backward(place == last)
                if end.requires_grad:  # not of a layer whose adapters have no effect
                    torch.autograd.backward(end, bring_back(values[place]))
                values[place] = None if start is None else put_away(start.grad)

    def _embed_tokens(self, micro: MicroBatch) -> tuple[Tensor, Sequence[Any]]:
        with self._autocast:
            return self._parts.embed_tokens(micro)


Order = Callable[[Sequence[MicroBatch], Callable[[bool], None]], Iterator[MicroBatch]]
"""`LayerMajorOrder.run_group`, or `run_in_turn`."""


def choose_order(
    model: Any,
    model_dir: Path,
    autocast: torch.autocast,
    *,
    recompute: bool,
    in_groups: bool,
) -> Order:
    """Return how the layers of a model run, ready to, and log why not by groups if they cannot.

    Args:
        recompute: layers are computed again in backward.
        in_groups: micro-batches run layer by layer.
    """
    if in_groups:
        try:
            parts = (
                DecoderParts(model.model)
                if isinstance(model, Decoder)
                else PublishedParts(model, autocast)
            )
            return LayerMajorOrder(parts, autocast, recompute=recompute).run_group
        except InseparableLayersError as reason:
            log.info("%s: layers are read for one micro-batch at a time: %s", model_dir, reason)
    if recompute:
        recompute_activations(model)
    return run_in_turn


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
