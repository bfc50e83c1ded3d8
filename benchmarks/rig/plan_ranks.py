"""Memory of a rank's steps against the plan, for `benchmarks/plan.py --engine ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.parallel_models import RANKS, STRATEGIES, encoded
from rig.resident import EXACT, Peak, own_bytes

ROWS, TOKENS = 4, 256
"""Of a step, over all ranks."""
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


def weigh_ranks(case: dict[str, Any]) -> dict[str, Any]:
    """Return planned and peak bytes of the rank that took most, each a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        running = [
            subprocess.Popen(
                [
                    *(sys.executable, sys.argv[0], "--case"),
                    json.dumps({**case, "rank": rank, "store": f"{scratch}/store"}),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **EXACT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(RANKS)
        ]
        said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"plan: a rank of {case['strategy']} failed")
    return max((json.loads(text.splitlines()[-1]) for text in said), key=lambda each: each["peak"])


def be_rank(
    tree: dict[str, Any], settings: dict[str, Any], strategy: str, rank: int, store: str
) -> dict[str, Any]:
    """Return planned and peak bytes of this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rendezvous = dist.FileStore(store, RANKS)  # pyright: ignore[reportPrivateImportUsage]  # documented
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=RANKS)
    try:
        if settings.get("model.quantization"):
            import bitsandbytes  # noqa: F401  # loaded first: its own memory is not the model's
        train(SMALL, settings, strategy)  # loads what a strategy imports late
        return train(tree, settings, strategy)
    finally:
        dist.destroy_process_group()


def train(tree: dict[str, Any], settings: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Return planned and peak bytes of two steps of a model with random weights."""
    import torch

    from benchmarks.compare.random_model import write_model
    from trainer.config.run import load
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import strategy_of, training_of
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
        config = load(None, given | settings | STRATEGIES[strategy])
        layout = build_layout(folder, config)
        weights = initial_weights(layout, folder, config)
        mesh = make_mesh(config.parallel, RANKS, "cpu")
        drawing = torch.Generator().manual_seed(1)  # all ranks have the same samples
        ids = torch.randint(3, tree["vocab_size"], (ROWS, TOKENS), generator=drawing)
        before = own_bytes()
        with Peak() as peak:
            replica = ParallelReplica(folder, config, layout, mesh, torch.device("cpu"), weights)
            optimizer = torch.optim.AdamW(replica.parameters.values(), foreach=False)
            share = replica.share(ROWS)
            batch = encoded(ids[share.start : share.stop])
            for _ in range(2):
                replica.accumulate(batch)
                optimizer.step()
        spread = strategy_of(config.parallel, RANKS)
        if spread.stages == 1:
            spread = replace(spread, microbatches=1)
        rows = ROWS // spread.replicas // spread.microbatches
        training = training_of(config, accelerator=False, recompute=False)
        parts = plan_memory_by_part(read_shape(folder), replace(training, rows=rows), spread)
        size = parts.bytes()
        return {"planned": sum(size.values()), "peak": peak.bytes - before, "parts": size}
