"""What processes cannot share is refused before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica.torch.parallel.models import write_drawn_model
from trainer.config.run import load_config
from trainer.model.shards import check_shards
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, {"tensor": 4}, "its 6 attention"),
        ({}, {"tensor": 4}, "parallel.tensor 4 does not divide its 2 key-value heads"),
        ({"intermediate_size": 129}, {"tensor": 2}, "its 129 MLP columns"),
        ({"head_dim": 16}, {"tensor": 2, "nf4": True}, "o_proj is 64 wide; nf4 with parallel.te"),
        ({"hidden_size": 96}, {"tensor": 2, "nf4": True}, "q_proj is 96 wide; .*multiple of 64"),
    ],
)
def test_refusals(
    tmp_path: Path, model: dict[str, int], settings: dict[str, int], message: str
) -> None:
    folder = write_drawn_model(tmp_path / "model", "qwen3", **model)
    config = load_config(
        None,
        {
            "model.path": str(folder),
            "data.train": "train.jsonl",
            "num_classes": 3,
            "parallel.tensor": settings["tensor"],
            "model.quantization": "nf4" if "nf4" in settings else "none",
        },
    )
    with pytest.raises(InputError, match=message):
        check_shards(folder, config)
    check_shards(folder, config.with_settings({"parallel.tensor": 1}))


DIVIDED = "gemma2 .* which tensor parallelism and pipelines do not divide; use parallel.data ddp"


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("gemma2", {"parallel__tensor": 2}, DIVIDED),
        ("gemma2", {"parallel__pipeline__stages": 2, "parallel__data": "ddp"}, DIVIDED),
        ("gemma2", {"parallel__data": "fsdp"}, None),
        ("mixtral", {"method": "full"}, "experts that are stored one by one"),
        ("mixtral", {}, None),
        ("gpt_oss", {"method": "full"}, None),
    ],
)
def test_layers_of_transformers_are_not_divided(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    model_type: str,
    settings: dict[str, Any],
    message: str | None,
) -> None:
    folder = tiny_model(model_type)
    config = make_config(folder, task="causal-lm", **settings)
    if message is None:
        check_shards(folder, config)
        return
    with pytest.raises(InputError, match=message):
        check_shards(folder, config)
