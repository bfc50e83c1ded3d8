"""Layers that transformers' code computes, by ranks that copy them or shard their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica.torch.parallel.test_exactness import METHODS, check, first_step

if TYPE_CHECKING:
    from tests.conftest import TinyModel
    from tests.distributed_ranks import Ranks

HERE = "tests.trainer.replica.torch.parallel.test_families"
CASES = [
    ("gemma2", "full", "ddp", False),
    ("gemma2", "full", "fsdp", True),
    ("mixtral", "lora", "fsdp", False),
    ("gpt2", "qlora", "ddp", True),
    ("gpt2", "qlora", "fsdp", False),
]


def first_steps(cases: list[tuple[str, dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Return what each case finds: the import of transformers takes longer than all of them."""
    return [first_step(*case) for case in cases]


@pytest.fixture(scope="module")
def found(ranks: Ranks, tiny_model: TinyModel) -> list[dict[str, Any]]:
    """Return what the first rank found in each case."""
    cases = [
        (str(tiny_model(model_type)), METHODS[method] | {"parallel.data": strategy}, recompute)
        for model_type, method, strategy, recompute in CASES
    ]
    return ranks.run(f"{HERE}:first_steps", cases, patience=280.0)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_first_step(found: list[dict[str, Any]], case: tuple[str, str, str, bool]) -> None:
    check([found[CASES.index(case)]])
