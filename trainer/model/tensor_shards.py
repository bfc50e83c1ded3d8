"""Check, before loading, whether tensor-parallel processes can share a model's layers."""

from __future__ import annotations

from pathlib import Path

from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.system.errors import InputError

_NF4_BLOCK = 64


def check_tensor_shards(model_dir: Path, config: RunConfig) -> None:
    """Refuse a `parallel.tensor` that does not divide the model.

    The vocabulary need not divide: the last process has fewer tokens.

    Raises:
        InputError: names the sizes.
    """
    ranks, model = config.parallel.tensor, read_architecture(model_dir)
    sizes = {
        "attention heads": model.num_heads,
        "key-value heads": model.num_kv_heads,
        "MLP columns": model.intermediate_size,
    }
    for what, size in sizes.items():
        if size % ranks:
            raise InputError(
                f"{model_dir}: parallel.tensor {ranks} does not divide its {size} {what}"
            )
    if config.model.quantization != "nf4" or ranks == 1:
        return
    for linear in ("q_proj", "o_proj", "down_proj"):
        width = model.linear_shape(linear)[1]
        parts = 1 if linear == "q_proj" else ranks
        if width % (_NF4_BLOCK * parts):
            raise InputError(
                f"{model_dir}: {linear} is {width} wide; nf4 with parallel.tensor {ranks} needs a"
                f" multiple of {_NF4_BLOCK * parts}, whole blocks of {_NF4_BLOCK} for each process:"
                " set model.quantization none, or parallel.data fsdp without tensor"
            )
