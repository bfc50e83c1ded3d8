"""What tensor-parallel processes cannot share is refused from config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.replica.torch.parallel.models import write_drawn_model
from trainer.config.run import load
from trainer.model.tensor_shards import check_tensor_shards
from trainer.system.errors import InputError


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
    config = load(
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
        check_tensor_shards(folder, config)
    check_tensor_shards(folder, config.with_settings({"parallel.tensor": 1}))
