"""Layers of transformers' models whose keys and values a `LayerStore` keeps."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.torch.cache import LayerStore, attend_in

_SDPA = "sdpa"
_STORED = "motley_store"
"""Names of implementations of attention, ours as it is registered."""


class StoredLayers:
    """The cache of a batch of rows, and attention of a backbone that goes by it.

    Args:
        store: has room for the rows.
    """

    def __init__(self, backbone: Any, store: LayerStore) -> None:
        self.places: Tensor | None = None
        """Positions of the next tokens, `[B, 1]`; None for prompts."""
        self.cache = transformers.DynamicCache(config=backbone.config)
        for layer in store.layers:
            self.cache.layers[layer] = _ForwardingLayer()
        self._store = store
        interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
        self._sdpa = interfaces[0]()[_SDPA]
        interfaces[0].register(_STORED, self._attend_stored)
        interfaces[1].register(_STORED, interfaces[1]()[_SDPA])
        backbone.set_attn_implementation(_STORED)

    def _attend_stored(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        if module.layer_idx in self._store.layers:
            factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
            stored = self._store, module.layer_idx
            mixed = attend_in(*stored, query * factor, key, value, self.places)
            if mixed is not None:
                return mixed.transpose(1, 2), None
        return self._sdpa(module, query, key, value, attention_mask, scaling=scaling, **settings)


class _ForwardingLayer(DynamicLayer):
    """Hands on keys and values of new tokens alone, and counts the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the same."""
        self._length += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the tokens so far."""
        return self._length


def forget_store(backbone: Any) -> None:
    """Let a backbone attend as it did before any `StoredLayers`."""
    if backbone.config._attn_implementation == _STORED:
        backbone.set_attn_implementation(_SDPA)


@torch.no_grad()
def storable_layers(backbone: Any) -> tuple[KVShape | None, list[int]]:
    """Return the layers that a store may keep, and their shape.

    These attend to all tokens by torch's scaled dot products, without sinks or caps, which other
    implementations compute; their heads of keys and of values are alike. None if there are none.
    """
    shape, layers = None, list[int]()
    if backbone.config._attn_implementation != _SDPA:
        return shape, layers
    cache = transformers.DynamicCache(config=backbone.config)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=backbone.device)
    backbone(ids, past_key_values=cache, use_cache=True)
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            continue
        _, heads, _, width = layer.keys.shape
        found = KVShape(backbone.config.num_attention_heads, heads, width)
        if layer.values.shape == layer.keys.shape and found == (shape or found):
            shape = found
            layers.append(number)
    return shape, layers
