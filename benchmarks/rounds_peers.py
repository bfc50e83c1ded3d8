"""Motley's rounds beside PyTorch's PostLocalSGDOptimizer and torchft's DiLoCo: `make demo` first.

    python benchmarks/rounds_peers.py [--demo demo] [--steps 420] [--inner-steps 20] [--batch 8]

Four equal workers train the preset `quickstart` with smaller batches: the same samples in the same
order from the same weights at the same learning rates, by AdamW. PyTorch's runs in four processes
over gloo, torchft's also with a lighthouse and a manager for each; Motley's as in rounds.py. A byte
counts where a worker hands it to the exchange, which a ring of four sends 1.5 times, and a star
once. `pip install torchft==0.2.0` adds torchft; without it that row is missing.

Finished runs are kept in --work and not repeated. Writes
benchmarks/results/rounds_peers-STEPS.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import torch
from rig.demo_model import DEMO, open_demo, require_demo, validate
from rig.ranks import RANKS, Trained, run_ranks
from rig.report import Ratio, Report
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from trainer.build.inputs import RunInputs
from trainer.config.run import OptimizerConfig
from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import learning_rate_at
from trainer.replica.torch.replica import TorchReplica

_PATIENCE = timedelta(minutes=30)
"""Of torchft, on a machine with other work."""


@dataclass(frozen=True)
class Run:
    """What all peers share."""

    demo: Path
    steps: int
    inner_steps: int
    batch: int
    lighthouse: str = ""


def main() -> int:
    """Train what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--work", type=Path, help="default: rounds-peers in the demo's folder")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=int, default=99, help="of runs trained now")
    options = parser.parse_args()
    require_demo(options.demo)
    if options.steps % options.inner_steps:
        parser.error("--steps is a multiple of --inner-steps, so that all ends with a round")
    work: Path = options.work or options.demo / "rounds-peers"
    work.mkdir(exist_ok=True)
    run = Run(options.demo.resolve(), options.steps, options.inner_steps, options.batch)
    done: dict[str, dict[str, Any]] = {}
    for name, train in runs(run).items():
        slug = "".join(letter if letter.isalnum() else "-" for letter in name)
        file = work / f"{run.steps}-{run.inner_steps}-{run.batch}-{slug}.json"
        if not file.exists() and options.limit > 0:
            options.limit -= 1
            found = train()
            file.write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(f"{name}: {found['loss']:.4f}", flush=True)
        if file.exists():
            done[name] = json.loads(file.read_text(encoding="utf-8"))
    return report(done, run.steps)


def runs(run: Run) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return every run by its name."""
    case = rounds.Case(run.inner_steps, run.steps, equal=True, batch=run.batch)
    mean = replace(case, rate=1.0, momentum=0.0)

    def ours(case: rounds.Case) -> Callable[[], dict[str, Any]]:
        return lambda: rounds.train(run.demo, case)

    found: dict[str, Callable[[], dict[str, Any]]] = {
        "every step": ours(replace(case, inner_steps=1, equal=False)),
        "Motley, mean of weights, int8": ours(replace(mean, codec="int8")),
        "PostLocalSGDOptimizer": lambda: run_ranks(post_local, run)[0],
        "Motley, eta 0.7, mu 0.9, int8": ours(replace(case, codec="int8")),
        "torchft 0.2.0 DiLoCo": lambda: torchft(run),
        "Motley, mean of weights, fp32": ours(mean),
        "Motley, eta 0.7, mu 0.9, fp32": ours(case),
    }
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: pip install torchft==0.2.0")
        del found["torchft 0.2.0 DiLoCo"]
    return found


def post_local(rank: int, run: Run) -> dict[str, Any]:
    """Train one rank with PyTorch's optimizer: a mean of all weights every so many steps."""

    def wrap(_: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        averager = PeriodicModelAverager(period=run.inner_steps)
        # By itself it averages after step 1, then after each period: the last steps never.
        averager.step = 1
        return PostLocalSGDOptimizer(inner, averager), nullcontext()

    inputs, replica = _train_rank(rank, run, wrap)
    return _result(rank, inputs, replica, run.steps // run.inner_steps / run.steps)


def torchft(run: Run) -> dict[str, Any]:
    """Train with torchft's DiLoCo and its published outer optimizer."""
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=RANKS,
        join_timeout_ms=60_000,
        heartbeat_timeout_ms=600_000,
    )
    port = lighthouse.address().rpartition(":")[2]
    try:
        return run_ranks(_torchft_rank, replace(run, lighthouse=f"http://127.0.0.1:{port}"))[0]
    finally:
        lighthouse.shutdown()


def _torchft_rank(rank: int, run: Run) -> dict[str, Any]:
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    managers: list[Manager] = []

    def wrap(trained: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        manager = Manager(
            pg=ProcessGroupGloo(timeout=_PATIENCE),
            load_state_dict=trained.load_state_dict,
            state_dict=trained.state_dict,
            min_replica_size=RANKS,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            connect_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=run.lighthouse,
            replica_id=str(rank),
            hostname="127.0.0.1",
            init_sync=False,
        )
        managers.append(manager)
        outer = torch.optim.SGD(trained.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return inner, DiLoCo(manager, [trained], inner, outer, sync_every=run.inner_steps)

    inputs, replica = _train_rank(rank, run, wrap)
    (manager,) = managers
    rounds_done = manager.current_step()
    torch.distributed.barrier()
    manager.shutdown(wait=False)
    assert rounds_done == run.steps // run.inner_steps, rounds_done
    return _result(rank, inputs, replica, rounds_done / run.steps)


Wrap = Callable[[Trained, torch.optim.Optimizer], tuple[Any, AbstractContextManager[Any]]]


def _train_rank(rank: int, run: Run, wrap: Wrap) -> tuple[RunInputs, TorchReplica]:
    """Train a quarter of each step's samples; `wrap` returns what steps, and its context."""
    changes = {"training__batch_size": run.batch}
    inputs, replica = open_demo(run.demo, run.steps, **changes)
    config, layout, plan = inputs.config, inputs.layout, inputs.plan
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
            mine = np.array_split(order[at.start : at.stop], RANKS)[rank]
            replica.write_trainable(trained.flat())
            replica.forward_backward([inputs.train[int(index)] for index in mine], keep)
            optimizer.zero_grad()
            trained(gradient / np.float32(len(mine))).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), config.optimizer.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, plan.total_steps, config.optimizer)
            optimizer.step()
    replica.write_trainable(trained.flat())
    return inputs, replica


def _adamw(trained: Trained, settings: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [tensor for tensor in trained.tensors if tensor.dim() > 1]
    rest = [tensor for tensor in trained.tensors if tensor.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        *([{"params": rest, "weight_decay": 0.0}] if rest else []),
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, settings.learning_rate, betas, settings.epsilon)


def _result(rank: int, inputs: RunInputs, replica: TorchReplica, sent: float) -> dict[str, Any]:
    """Return what a run came to; `sent` is in vectors of all weights an inner step."""
    if rank:
        return {}
    return {**validate(inputs, replica), "bytes_an_inner_step": 4 * inputs.layout.size * sent}


def report(done: dict[str, dict[str, Any]], steps: int) -> int:
    """Print and write each run's loss and bytes beside those of every step."""
    written = Report(f"rounds_peers-{steps}")
    base = done["every step"]
    for name, run in done.items():
        written.add(
            Ratio(f"{name}: percent above", 100 * (run["loss"] / base["loss"] - 1), "every step's"),
            loss=run["loss"],
            accuracy=run["accuracy"],
            bytes_an_inner_step=run["bytes_an_inner_step"],
            of_every_steps_bytes=run["bytes_an_inner_step"] / base["bytes_an_inner_step"],
        )
    for ours, peer in (
        ("Motley, mean of weights, int8", "PostLocalSGDOptimizer"),
        ("Motley, eta 0.7, mu 0.9, int8", "torchft 0.2.0 DiLoCo"),
    ):
        if ours in done and peer in done:
            for key, what in (("loss", "loss"), ("bytes_an_inner_step", "bytes")):
                ratio = done[ours][key] / done[peer][key]
                written.add(Ratio(f"{ours}: {what}", ratio, f"{peer}'s", 1.0))
    return written.write()


if __name__ == "__main__":
    sys.exit(main())
