"""The keys and values of past tokens, so that a new token computes its own alone."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """The cache of a decoder's layers for rows that begin at place 0 and may differ in length.

    The first run takes all prompts, `[B, T]`, shorter ones with anything behind them; each run
    after it takes one token a row, which replaces what was behind a shorter prompt.

    Args:
        slots: the most tokens of a row.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._used = 0
        self._places = torch.empty(0)
        self._layers: list[tuple[Tensor, Tensor]] = []
        """Keys and values of a layer, `[B, heads, slots, head_dim]` each."""

    def advance(self, places: Tensor | None, width: int) -> Tensor | None:
        """Prepare for the next tokens, and return which slots they see, bool `[B, 1, 1, used]`.

        Args:
            places: of the new tokens, `[B, 1]`; None for prompts, which need no mask.
            width: tokens of a row.
        """
        self._used += width
        assert self._used <= self._slots, f"{self._used} tokens in {self._slots} slots"
        if places is None:
            return None
        self._places = places
        slots = torch.arange(self._used, device=places.device)
        return (slots <= places)[:, None, None]

    def join(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of new tokens `[B, heads, T, head_dim]`; return all of the layer."""
        if layer == len(self._layers):
            shape = (*keys.shape[:2], self._slots, keys.shape[3])
            kept = keys.new_zeros(shape), values.new_zeros(shape)
            self._layers.append(kept)
            for every, new in zip(kept, (keys, values), strict=True):
                every[:, :, : self._used] = new
            return keys, values
        kept = self._layers[layer]
        for every, new in zip(kept, (keys, values), strict=True):
            rows = torch.arange(len(every), device=every.device)
            every[rows, :, self._places[:, 0]] = new[:, :, 0]
        return kept[0][:, :, : self._used], kept[1][:, :, : self._used]
