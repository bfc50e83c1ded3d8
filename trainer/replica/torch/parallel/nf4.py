"""A rank's part of a linear in NF4: the same codes and scales, so the cut changes no weight."""

from __future__ import annotations

from typing import Any

import torch


def cut_nf4(linear: Any, dim: int, rank: int, ranks: int) -> None:
    """Keep a part of bitsandbytes' NF4 linear, by its outputs (0) or its inputs (1), in place.

    A byte has two neighbours of a row, and a scale is for 64 of them: the parts of a row must be
    whole blocks. `trainer.model.shards` refuses others before a model is loaded.
    """
    weight, state = linear.weight, linear.weight.quant_state
    rows, columns = state.shape
    assert columns % (state.blocksize * (ranks if dim else 1)) == 0, f"{columns} columns"
    assert not state.nested, "the scales are quantised too"

    def part(values: torch.Tensor) -> torch.Tensor:
        return values.view(rows, -1).chunk(ranks, dim)[rank].contiguous()

    shape = torch.Size((rows // ranks, columns) if dim == 0 else (rows, columns // ranks))
    mine = type(state)(
        absmax=part(state.absmax).view(-1),
        shape=shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    linear.weight = type(weight)(
        part(weight.data).view(-1, 1),
        requires_grad=False,
        quant_state=mine,
        blocksize=state.blocksize,
        compress_statistics=False,
        quant_type=state.quant_type,
        quant_storage=weight.quant_storage,
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = mine
    linear.out_features, linear.in_features = shape
