"""Frozen matrices of a mixture of experts, of which a pass takes those that its tokens need.

They are in NF4, or in memory only while their layer has its turn. Operations and their order are
those of transformers' grouped products, matrix by matrix, and on processors so are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.safetensors_headers import TensorHeader
from trainer.planning.vulkan_buffers import NF4_BLOCK
from trainer.replica.torch.streaming import (
    DTYPES,
    FetchedProduct,
    unpack_nf4,
)
from trainer.replica.weights.frozen_weights import FrozenWeights
from trainer.replica.weights.nf4_file import ABSMAX


class LayerBytes(Protocol):
    """Stored tensors of layers, as `LayerStream` and `ResidentLayer` have them."""

    def read(self, layer: int, name: str, *, trains: bool) -> Tensor:
        """Return a tensor's bytes, u8, on the device."""
        ...


class ResidentLayer:
    """Stored tensors of one layer, in memory of their own on the device."""

    def __init__(
        self, layer: int, tensors: Mapping[str, TensorHeader], device: torch.device
    ) -> None:
        self._weights = FrozenWeights({layer: tensors})
        memory = np.empty(self._weights.span_bytes, np.uint8)
        self._weights.read_layer(layer, memory.data)
        self._weights.close()
        self._memory = torch.from_numpy(memory).to(device)

    def read(
        self,
        layer: int,
        name: str,
        *,
        trains: bool,  # noqa: ARG002 - as LayerStream has it
    ) -> Tensor:
        """Return a tensor's bytes, u8, on the device."""
        start, stop = self._weights.span(layer, name)
        return self._memory[start:stop]


class StoredExperts:
    """The matrices of a parameter that stacks experts, `[experts, out, in]` or transposed.

    Args:
        tensors: names in `source`, by expert and part: gate and up are parts of one matrix. One
            name alone has all experts.
        shape: of the parameter.
        transposed: it is `[experts, in, out]`.
        stored: dtype in the file, in safetensors' words.
        dtype: of the base.
        nf4: the dtype of products with weights in NF4; None: they are as they are stored.
    """

    def __init__(
        self,
        source: LayerBytes,
        layer: int,
        tensors: Sequence[Sequence[str]],
        shape: tuple[int, ...],
        *,
        transposed: bool,
        stored: str,
        dtype: torch.dtype,
        nf4: torch.dtype | None,
    ) -> None:
        self.experts, self._shape = shape[0], shape[1:]
        self._source, self._layer, self._tensors = source, layer, tensors
        self._transposed, self._stored, self._dtype = transposed, stored, dtype
        self._nf4 = nf4
        self.adapter: Any = None
        """The `LoraParameter` of this parameter."""

    def multiply(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return `[S, out]` of `[S, in]`, sorted by expert.

        Args:
            counts: rows of each expert.
        """
        adapter: Any = self.adapter
        sides = None if adapter is None or not adapter.enabled else adapter.expert_factors()
        found: list[Tensor] = []
        with torch.autocast(x.device.type, enabled=False):
            narrow, trains = x.to(self._nf4 or self._dtype), torch.is_grad_enabled()
            rows = zip(narrow.split(counts), x.split(counts), strict=True)
            for expert, (part, own) in enumerate(rows):
                if not len(part):
                    continue
                made: Any = FetchedProduct.apply(part, _Matrix(self, expert), trains)
                if self._nf4 is not None:
                    made = made.to(x.dtype)
                if sides is not None:
                    down, up = (side[expert] for side in sides)
                    low = F.linear(own.to(down.dtype), down)
                    made = made + F.linear(low, up).to(made.dtype)
                found.append(made)
        return torch.cat(found)

    def fetch(self, expert: int, dtype: torch.dtype | None, *, trains: bool) -> Tensor:
        """Return the matrix of an expert, `[out, in]`; see `StreamedLinear.fetch_weight`."""
        elements = math.prod(self._shape)
        if self._nf4 is None:
            raw = self._gather(expert, elements * DTYPES[self._stored].itemsize, "", trains=trains)
            found = raw.view(DTYPES[self._stored]).view(self._shape).to(self._dtype)
        else:
            codes = self._gather(expert, elements // 2, "", trains=trains)
            absmax = self._gather(expert, 4 * elements // NF4_BLOCK, ABSMAX, trains=trains)
            found = unpack_nf4(codes, absmax, self._shape, dtype or self._dtype)
        return found.t() if self._transposed else found

    def _gather(self, expert: int, size: int, end: str, *, trains: bool) -> Tensor:
        """Return the bytes of a matrix, which lie in one tensor or in several."""
        if len(self._tensors) == 1:
            (name,) = self._tensors[0]
            whole = self._source.read(self._layer, name + end, trains=trains)
            return whole[expert * size : (expert + 1) * size]
        parts = [
            self._source.read(self._layer, name + end, trains=trains)
            for name in self._tensors[expert]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Matrix:
    """One expert's, as a `FetchedProduct` takes it."""

    bias = None

    def __init__(self, stored: StoredExperts, expert: int) -> None:
        self._stored, self._expert = stored, expert

    def fetch_weight(self, dtype: torch.dtype | None, /, *, trains: bool) -> Tensor:
        return self._stored.fetch(self._expert, dtype, trains=trains)


def attach_experts(module: Any, stored: Mapping[str, StoredExperts]) -> None:
    """Let a module of transformers compute with stored matrices.

    Args:
        module: has lost these parameters.
        stored: by the parameter's name.
    """
    module.stored = dict(stored)
    module.forward = partial(_run_experts, module)


def _run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return `[T, D]` of `[T, D]`, as `grouped_mm_experts_forward` of transformers does.

    Args:
        chosen: experts of each token, `[T, K]`.
        weights: of their results, `[T, K]`.
    """
    stored: dict[str, StoredExperts] = module.stored
    inner, outer = stored["gate_up_proj" if module.has_gate else "up_proj"], stored["down_proj"]
    each = chosen.size(-1)
    numbers, order = torch.sort(chosen.reshape(-1))
    counts = torch.bincount(numbers, minlength=inner.experts).cpu().tolist()

    def add_bias(product: Tensor, name: str) -> Tensor:
        return product + getattr(module, name)[numbers] if module.has_bias else product

    product = inner.multiply(hidden[order // each], counts)
    product = add_bias(product, "gate_up_proj_bias" if module.has_gate else "up_proj_bias")
    product = module._apply_gate(product) if module.has_gate else module.act_fn(product)
    product = add_bias(outer.multiply(product, counts), "down_proj_bias")
    if module.has_post_expert_norm:
        product = module.post_expert_norm(product)
    product = product * weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    found = product[places].view(len(hidden), each, -1).sum(dim=1)
    return found.to(hidden.dtype)
