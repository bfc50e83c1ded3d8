"""The model, its samples and the strategies that `benchmarks/parallel.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANKS, MICROBATCHES = 2, 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.data": "ddp"},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": RANKS},
    "tp-sp": {"parallel.tensor": RANKS, "parallel.sequence": True},
    "pp": {
        "parallel.pipeline.stages": RANKS,
        "parallel.pipeline.microbatches": MICROBATCHES,
    },
}
TREE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
}
ROWS, TOKENS = 4, 128


def write_model(folder: Path, **sizes: int) -> Path:
    """Let rank 0 draw a model's weights, and return its folder."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from rig.plain import Plain

    tree = TREE | sizes
    path = folder / f"model-{tree['hidden_size']}"
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        path.mkdir()
        weights = {name: 0.05 * torch.randn_like(p) for name, p in Plain(tree).named_parameters()}
        for name, weight in weights.items():
            if "norm" in name:
                weight.add_(1)
        save_file(weights, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(tree))
    dist.barrier()
    return path


def ours(path: Path, strategy: str, mesh: Any) -> Any:
    """Return this rank's replica of a strategy."""
    import torch

    from trainer.config.run import load
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.replica.torch.parallel.replica import ParallelReplica

    config = load(None, settings(path) | STRATEGIES[strategy])
    layout = build_layout(path, config)
    weights = initial_weights(layout, path, config)
    return ParallelReplica(path, config, layout, mesh, torch.device("cpu"), weights)


def settings(path: Path) -> dict[str, Any]:
    """Return a run config's settings: full fine-tuning in one micro-batch."""
    return {
        "model.path": str(path),
        "data.train": "none",
        "task": "causal-lm",
        "method": "full",
        "training.micro_batch_size": ROWS,
    }


def meshes() -> dict[str, Any]:
    """Return the mesh of each strategy."""
    from trainer.config.parallel import ParallelConfig, PipelineConfig
    from trainer.replica.torch.parallel.mesh import make_mesh

    copies, tensor, stages = (
        make_mesh(parallel, RANKS, "cpu")
        for parallel in (
            ParallelConfig(),
            ParallelConfig(tensor=RANKS),
            ParallelConfig(pipeline=PipelineConfig(stages=RANKS)),
        )
    )
    return {"ddp": copies, "fsdp": copies, "tp": tensor, "tp-sp": tensor, "pp": stages}


def rows() -> Any:
    """Return token ids `[ROWS, TOKENS]`."""
    import torch

    drawing = torch.Generator().manual_seed(1)
    return torch.randint(3, TREE["vocab_size"], (ROWS, TOKENS), generator=drawing)


def encoded(ids: Any) -> list[Any]:
    """Return rows as samples."""
    from trainer.data.encoder import IGNORED
    from trainer.data.tokens import Encoded

    given = ids.int().numpy()
    wanted = given.copy()
    wanted[:, 0] = IGNORED
    return [Encoded(*row) for row in zip(given, wanted, strict=True)]
