"""Memory of a rank's steps against the plan, for `benchmarks/plan.py --engine ranks`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.resident import EXACT, Peak, own_bytes

RANKS = 2
ROWS, TOKENS = 4, 256
"""Of a step, over all ranks."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.data": "ddp"},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": RANKS},
    "tp-sp": {"parallel.tensor": RANKS, "parallel.sequence": True},
    "pp": {"parallel.pipeline.stages": RANKS, "parallel.pipeline.microbatches": 4},
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def weigh_ranks(tree: dict[str, Any], settings: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Return planned and peak bytes of the rank that took most, each a process of its own."""
    from rig.ranks import ALONE, Ranks  # with torch, which not every engine needs

    with Ranks(RANKS, EXACT | ALONE) as ranks:
        found = ranks.run_all(_weigh, tree, settings, strategy)
    return max(found, key=lambda each: each["peak"])


def _weigh(
    _rank: int, tree: dict[str, Any], settings: dict[str, Any], strategy: str
) -> dict[str, Any]:
    """Return planned and peak bytes of this rank."""
    import torch

    torch.set_num_threads(1)
    if settings.get("model.quantization"):
        import bitsandbytes  # noqa: F401  # loaded first: its own memory is not the model's
    train(SMALL, settings, strategy)  # loads what a strategy imports late
    return train(tree, settings, strategy)


def train(tree: dict[str, Any], settings: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Return planned and peak bytes of two steps of a model with random weights."""
    import torch

    from benchmarks.rig.random_model import write_model
    from benchmarks.rig.training_step import random_rows
    from trainer.config.run import load_config
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import make_strategy, make_training_setup
    from trainer.replica.torch.parallel.mesh import make_mesh
    from trainer.replica.torch.parallel.replica import ParallelReplica

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch), tree, "F32")
        given = {
            "model.path": str(folder),
            "data.train": "none",
            "task": "causal-lm",
            "data.max_seq_len": TOKENS,
            "training.micro_batch_size": ROWS,
        }
        config = load_config(None, given | settings | STRATEGIES[strategy])
        layout = build_layout(folder, config)
        weights = initial_weights(layout, folder, config)
        mesh = make_mesh(config.parallel, RANKS, "cpu")
        samples = random_rows(tree["vocab_size"], ROWS, TOKENS, 1)  # the same on all ranks
        before = own_bytes()
        with Peak() as peak:
            replica = ParallelReplica(folder, config, layout, mesh, torch.device("cpu"), weights)
            optimizer = torch.optim.AdamW(replica.parameters.values(), foreach=False)
            share = replica.local_samples(ROWS)
            batch = samples[share.start : share.stop]
            for _ in range(2):
                replica.accumulate(batch)
                optimizer.step()
        spread = make_strategy(config.parallel, RANKS)
        if spread.stages == 1:
            spread = replace(spread, microbatches=1)
        rows = ROWS // spread.replicas // spread.microbatches
        training = make_training_setup(config, accelerator=False, recompute=False)
        parts = plan_memory_by_part(read_shape(folder), replace(training, rows=rows), spread)
        size = parts.bytes_by_part()
        return {"planned": sum(size.values()), "peak": peak.bytes - before, "parts": size}
