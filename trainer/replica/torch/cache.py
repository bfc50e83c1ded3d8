"""The keys and values of past tokens, so that a new token computes its own alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


class LayerStore(Protocol):
    """Keeps keys and values of some layers elsewhere, where new tokens attend to them."""

    layers: frozenset[int]
    """The layers' numbers."""

    def begin(self, batch: int, slots: int) -> None:
        """Make room for `slots` tokens of each of `batch` rows, in place of those before."""
        ...

    def fill(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Keep keys and values of prompts, `[B, Hkv, T, d]` each, from slot 0 on."""
        ...

    def attend(
        self,
        layer: int,
        queries: NDArray[np.float32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        places: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Keep keys and values of a token a row, and return its attention.

        Args:
            queries: `[B, Hq, d]`; heads that share keys are neighbours.
            keys: `[B, Hkv, d]`.
            values: `[B, Hkv, d]`.
            places: `[B]`, the slot of each token, which sees all slots up to its own.

        Returns:
            `[B * Hq, d]`
        """
        ...


class KVCache:
    """The cache of a decoder's layers for rows that begin at place 0 and may differ in length.

    The first run takes all prompts, `[B, T]`, shorter ones with anything behind them; each run
    after it takes one token a row, which replaces what was behind a shorter prompt.

    Args:
        slots: the most tokens of a row.
        store: keeps some of the layers, with room for the rows.
    """

    def __init__(self, slots: int, store: LayerStore | None = None) -> None:
        self._slots, self._store = slots, store
        self._used = 0
        self._places: Tensor | None = None
        self._mask: Tensor | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of a layer, `[B, heads, slots, head_dim]` each."""

    def advance(self, places: Tensor | None, width: int) -> None:
        """Prepare for the next tokens.

        Args:
            places: of the new tokens, `[B, 1]`; None for prompts.
            width: tokens of a row.
        """
        self._used += width
        assert self._used <= self._slots, f"{self._used} tokens in {self._slots} slots"
        self._places = places
        if places is not None:
            slots = torch.arange(self._used, device=places.device)
            self._mask = (slots <= places)[:, None, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        """Keep keys and values of new tokens `[B, Hkv, T, d]`, and return their attention.

        Args:
            layer: its number.
            queries: `[B, Hq, T, d]`; heads that share keys are neighbours.
            keys: of the new tokens.
            values: of the new tokens.

        Returns:
            `[B, Hq, 1, d]`; None for prompts, which see nothing before them.
        """
        if (store := self._store) is not None and layer in store.layers:
            return attend_in(store, layer, queries, keys, values, self._places)
        if self._places is None:
            self._fill_layer(layer, keys, values)
            return None
        kept = self._layers[layer]
        for every, new in zip(kept, (keys, values), strict=True):
            rows = torch.arange(len(every), device=every.device)
            every[rows, :, self._places[:, 0]] = new[:, :, 0]
        keys, values = (every[:, :, : self._used] for every in kept)
        # Queries that share keys are rows of a product.
        grouped = queries.reshape(*keys.shape[:2], -1, keys.shape[3])
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return mixed.reshape(queries.shape)

    def _fill_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        shape = (*keys.shape[:2], self._slots, keys.shape[3])
        self._layers[layer] = keys.new_zeros(shape), values.new_zeros(shape)
        for every, new in zip(self._layers[layer], (keys, values), strict=True):
            every[:, :, : self._used] = new


def attend_in(
    store: LayerStore,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor | None,
) -> Tensor | None:
    """Do what `Cache.attend` does with a layer of a store.

    Args:
        places: of the new tokens, `[B, 1]`; None for prompts.
    """
    if places is None:
        store.fill(layer, _on_host(keys), _on_host(values))
        return None
    asked, new_keys, new_values = (_on_host(part[:, :, 0]) for part in (queries, keys, values))
    mixed = store.attend(layer, asked, new_keys, new_values, places[:, 0].cpu().numpy())
    return torch.tensor(mixed, dtype=queries.dtype, device=queries.device).view_as(queries)


def _on_host(heads: Tensor) -> NDArray[np.float32]:
    return heads.float().cpu().numpy()
