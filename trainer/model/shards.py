"""Check, before loading, whether several processes can share a model."""

from __future__ import annotations

from pathlib import Path

from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_config
from trainer.system.errors import InputError

_NF4_BLOCK = 64


def check_shards(model_dir: Path, config: RunConfig) -> None:
    """Refuse a strategy that cannot divide the model.

    Layers of transformers' code stay whole: DDP copies them, FSDP shards their tensors. With
    tensor parallelism the vocabulary need not divide: the last process has fewer tokens.

    Raises:
        InputError: names the sizes, or what is not divided.
    """
    parallel = config.parallel
    if reason := explain_transformers_only(read_config(model_dir), config.data.max_seq_len):
        if parallel.tensor > 1 or parallel.pipeline.stages > 1:
            raise InputError(
                f"{model_dir}: {reason}, which tensor parallelism and pipelines do not divide; "
                "use parallel.data ddp or fsdp alone"
            )
        if any(slot.parameter for slot in build_layout(model_dir, config).iter_tensors()):
            raise InputError(
                f"{model_dir}: experts that are stored one by one are not trained in full by "
                "equal processes; use method lora, or a run with a coordinator"
            )
        return
    ranks, model = parallel.tensor, read_architecture(model_dir)
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
