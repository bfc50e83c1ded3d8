"""Layers that transformers' code computes, by ranks that copy them or shard their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trainer.replica.torch.parallel.test_exactness import HERE, METHODS, check

if TYPE_CHECKING:
    from tests.conftest import TinyModel
    from tests.distributed_ranks import Ranks


@pytest.mark.parametrize(
    ("model_type", "method", "strategy", "recompute"),
    [
        ("gemma2", "full", "ddp", False),
        ("gemma2", "full", "fsdp", True),
        ("mixtral", "lora", "fsdp", False),
        ("gpt2", "qlora", "ddp", True),
        ("gpt2", "qlora", "fsdp", False),
    ],
)
def test_first_step(
    ranks: Ranks,
    tiny_model: TinyModel,
    model_type: str,
    method: str,
    strategy: str,
    recompute: bool,
) -> None:
    settings = METHODS[method] | {"parallel.data": strategy}
    check(ranks.run(f"{HERE}:first_step", str(tiny_model(model_type)), settings, recompute))
