"""What a torch that is older than the locks' one cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.replica.torch.parallel.one_process import run_config
from trainer.replica.torch.parallel.replica import check_torch
from trainer.system.errors import InputError

NF4_SHARDS = {"model.quantization": "nf4", "parallel.data": "fsdp"}
STAGES = {"parallel.pipeline.stages": 2}


@pytest.mark.parametrize(
    ("settings", "copies", "message"),
    [
        (STAGES, 1, "a pipeline needs torch 2.13 or newer; here is 2.12.1"),
        (NF4_SHARDS, 2, "fsdp with model.quantization nf4 needs torch 2.13 or newer"),
    ],
)
def test_what_an_older_torch_cannot_do(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], copies: int, message: str
) -> None:
    config = run_config("/model", settings)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    check_torch(config, copies)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(InputError, match=message):
        check_torch(config, copies)


@pytest.mark.parametrize(("settings", "copies"), [(NF4_SHARDS, 1), ({"method": "lora"}, 2)])
def test_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], copies: int
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    check_torch(run_config("/model", settings), copies)
