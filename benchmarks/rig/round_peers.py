"""One run of rounds by Motley's peers, on three ranks; see rounds_peers.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from rig.ranks import Ranks, Trained
from rig.real_case import Judge, real_inputs
from trainer.config.optimizer import OptimizerConfig
from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.model.initialization import initial_weights
from trainer.optimizer.learning_rate import learning_rate_at
from trainer.run.inputs import RunInputs

WORKERS = 3
_PATIENCE = timedelta(minutes=30)
"""Of torchft, on a machine with other work."""


@dataclass(frozen=True)
class Run:
    """What all peers share."""

    model: Path
    work: Path
    rate: float
    seed: int
    data: str = "sections"
    layers: int = 10
    steps: int = 200
    inner_steps: int = 20
    server: str = ""
    """Address of what the peer's workers meet at."""

    def inputs(self) -> RunInputs:
        """Return what they read; the first call writes it."""
        settings = {"optimizer.learning_rate": self.rate, "training.seed": self.seed}
        return real_inputs(self.data, self.layers, self.steps, self.model, self.work, settings)


def post_local(ranks: Ranks, run: Run) -> dict[str, Any]:
    """Train with PyTorch's optimizer: a mean of all weights every so many steps."""
    return ranks.run(_post_local_rank, run)


def _post_local_rank(rank: int, run: Run) -> dict[str, Any]:
    def wrap(_: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        averager = PeriodicModelAverager(period=run.inner_steps)
        # By itself it averages after step 1, then after each period: the last steps never.
        averager.step = 1
        return PostLocalSGDOptimizer(inner, averager), nullcontext()

    return _train_rank(rank, run, wrap)


def torchft(ranks: Ranks, run: Run) -> dict[str, Any]:
    """Train with torchft's DiLoCo and its published outer optimizer."""
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=WORKERS,
        join_timeout_ms=60_000,
        heartbeat_timeout_ms=600_000,
    )
    port = lighthouse.address().rpartition(":")[2]
    try:
        known = replace(run, server=f"http://127.0.0.1:{port}")
        return ranks.run(_torchft_rank, known)
    finally:
        lighthouse.shutdown()


def _torchft_rank(rank: int, run: Run) -> dict[str, Any]:
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    managers: list[Manager] = []

    def wrap(trained: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        manager = Manager(
            pg=ProcessGroupGloo(timeout=_PATIENCE),
            load_state_dict=trained.load_state_dict,
            state_dict=trained.state_dict,
            min_replica_size=WORKERS,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            connect_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=run.server,
            replica_id=str(rank),
            hostname="127.0.0.1",
            init_sync=False,
        )
        managers.append(manager)
        outer = torch.optim.SGD(trained.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return inner, DiLoCo(manager, [trained], inner, outer, sync_every=run.inner_steps)

    found = _train_rank(rank, run, wrap)
    (manager,) = managers
    rounds_done = manager.current_step()
    torch.distributed.barrier()
    manager.shutdown(wait=False)
    assert rounds_done == run.steps // run.inner_steps, rounds_done
    return found


def forgather(ranks: Ranks, run: Run) -> dict[str, Any]:
    """Train with Forgather's DiLoCo: its server, its outer optimizer, bf16 on the wire."""
    from forgather.ml.diloco import DiLoCoServer  # pyright: ignore[reportMissingImports]

    inputs = run.inputs()
    weights = initial_weights(inputs.layout, inputs.model_dir, inputs.config)
    with tempfile.TemporaryDirectory() as folder:
        save_file(Trained(inputs.layout, weights).state_dict(), Path(folder) / "model.safetensors")
        server = DiLoCoServer(
            folder, WORKERS, folder, save_every_n_rounds=0, heartbeat_timeout=0, min_workers=WORKERS
        )
        server.start()
        try:
            return ranks.run(_forgather_rank, replace(run, server=server.address))
        finally:
            server.stop()


def _forgather_rank(rank: int, run: Run) -> dict[str, Any]:
    from forgather.ml.diloco import DiLoCoWorker  # pyright: ignore[reportMissingImports]

    workers: list[DiLoCoWorker] = []

    def wrap(trained: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        timeout = _PATIENCE.total_seconds()
        worker = DiLoCoWorker(
            trained, inner, run.server, run.inner_steps, str(rank), timeout=timeout
        )
        workers.append(worker)
        return inner, worker

    found = _train_rank(rank, run, wrap)
    metrics = workers[0].sync_metrics
    assert metrics["diloco/sync_count"] == run.steps // run.inner_steps, metrics
    sent = 1e6 * metrics["diloco/last_send_mb"] / run.inner_steps
    return found | {"bytes_up": sent}


Wrap = Callable[[Trained, torch.optim.Optimizer], tuple[Any, AbstractContextManager[Any]]]


def _train_rank(rank: int, run: Run, wrap: Wrap) -> dict[str, Any]:
    """Train a third of each step's samples; `wrap` returns what steps, and its context."""
    inputs = run.inputs()
    config, layout, plan = inputs.config, inputs.layout, inputs.plan
    replica = Judge(inputs.model_dir, config, layout, threads=1)
    assert isinstance(inputs.train, Dataset)
    trained = Trained(layout, initial_weights(layout, inputs.model_dir, config))
    optimizer, context = wrap(trained, _adamw(trained, config.optimizer))
    gradient = np.empty(layout.size, np.float32)

    def keep(index: int, values: np.ndarray) -> None:
        block = layout.blocks[index]
        gradient[block.start : block.stop] = values

    with context:
        for step in range(plan.total_steps):
            at = plan.at(step)
            order = epoch_order(config.training.seed, at.epoch, len(inputs.train))
            mine = np.array_split(order[at.start : at.stop], WORKERS)[rank]
            replica.write_trainable(trained.flat())
            found = replica.forward_backward([inputs.train[int(index)] for index in mine], keep)
            optimizer.zero_grad()
            trained(gradient / np.float32(found.weight)).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), config.optimizer.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, plan.total_steps, config.optimizer)
            optimizer.step()
    replica.write_trainable(trained.flat())
    if rank:
        return {}
    assert isinstance(inputs.validation, Dataset)
    return {
        **replica.score(run.data, inputs.validation),
        "bytes_up": 4 * layout.size / run.inner_steps,
    }


def _adamw(trained: Trained, settings: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [tensor for tensor in trained.tensors if tensor.dim() > 1]
    rest = [tensor for tensor in trained.tensors if tensor.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        *([{"params": rest, "weight_decay": 0.0}] if rest else []),
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, settings.learning_rate, betas, settings.epsilon)
