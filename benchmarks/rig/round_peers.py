"""One run of rounds by Motley, PyTorch and torchft, on four ranks; see rounds_peers.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from rig.demo_model import demo_inputs, open_demo, validate
from rig.ranks import RANKS, Ranks, Trained
from rig.sender import Sender
from rig.token_bag import TokenBag
from trainer.config.codec import codec_kind
from trainer.config.optimizer import OptimizerConfig
from trainer.data.order import epoch_order
from trainer.data.tokens import Dataset
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import TrainState
from trainer.optimizer.learning_rate import learning_rate_at
from trainer.optimizer.nesterov import OuterNesterov
from trainer.replica.base import Replica
from trainer.run.inner_steps import InnerSteps
from trainer.run.inputs import RunInputs

_PATIENCE = timedelta(minutes=30)
"""Of torchft, on a machine with other work."""


RATE = 2e-3
"""The preset's learning rate."""


@dataclass(frozen=True)
class Outer:
    """What Motley's rounds are set to."""

    rate: float
    momentum: float
    codec: str = "fp32"
    inner_rate: float = 1.0
    """Of the preset's learning rate."""

    @property
    def name(self) -> str:
        """What it is called in the report."""
        faster = "" if self.inner_rate == 1 else f", {self.inner_rate:g} of the learning rate"
        return f"Motley, eta {self.rate:g}, mu {self.momentum:g}, {self.codec}{faster}"


@dataclass(frozen=True)
class Run:
    """What all peers share."""

    demo: Path
    steps: int
    inner_steps: int
    batch: int
    model: str = "bag"
    """The demo's with adapters, or a small classifier of its data (rig/token_bag.py)."""
    seed: int = 0
    lighthouse: str = ""

    def open(self, rate: float = 1.0) -> tuple[RunInputs, Replica, np.ndarray]:
        """Return config and data, the model, and the weights that it begins with.

        Args:
            rate: of the preset's learning rate.
        """
        changes = {
            "training__seed": self.seed,
            "training__batch_size": self.batch,
            "optimizer__learning_rate": RATE * rate,
        }
        if self.model == "demo":
            inputs, replica = open_demo(self.demo, self.steps, **changes)
            return inputs, replica, initial_weights(inputs.layout, inputs.model_dir, inputs.config)
        bag = TokenBag(self.seed)
        inputs = replace(demo_inputs(self.demo, self.steps, **changes), layout=bag.layout)
        return inputs, bag, bag.start


def every_step(rank: int, run: Run) -> dict[str, Any]:
    """Train one rank with a sum of gradients at every step."""
    inputs, replica = _train_rank(rank, run, lambda _, inner: (inner, nullcontext()), reduce=True)
    return _result(rank, inputs, replica, 1.0)


def motley(rank: int, run: Run, outer: Outer) -> dict[str, Any]:
    """Train one rank in Motley's rounds."""
    inputs, replica, weights = run.open(outer.inner_rate)
    training, layout = inputs.config.training, inputs.layout
    assert isinstance(inputs.train, Dataset)
    plan = StepPlan(inputs.samples, run.batch, training.epochs, run.steps, run.inner_steps, ())
    state = TrainState.fresh(weights)
    replica.write_trainable(weights)
    inner = InnerSteps(replica, inputs.config.optimizer, plan, state)
    update = OuterNesterov(outer.rate, outer.momentum, layout)
    feedback = codec_kind(outer.codec).needs_feedback
    up, down = (Sender(outer.codec, layout, feedback=feedback) for _ in range(2))
    for step in range(plan.total_steps):
        at, settle = plan.at(step), plan.settles(step)
        order = epoch_order(training.seed, at.epoch, len(inputs.train))[at.start : at.stop]
        mine = [inputs.train[int(index)] for index in np.array_split(order, RANKS)[rank]]
        moved = inner.run(mine, step, run.batch // RANKS)
        sent = layout.doubled if settle else layout
        total, average = np.zeros((2, sent.size), np.float32)
        add = up.add_to(total, settle=settle)
        for block in sent.blocks:
            add(block.index, moved.block(block.index))
        torch.distributed.all_reduce(torch.from_numpy(total))
        total /= np.float32(len(order))
        add = down.add_to(average, settle=settle)
        for block in sent.blocks:
            add(block.index, total[block.start : block.stop])
        update.apply(state, average)
        inner.committed(step)
    replica.write_trainable(state.weights)
    return _result(rank, inputs, replica, up.sent / run.steps / (4 * layout.size))


def post_local(rank: int, run: Run) -> dict[str, Any]:
    """Train one rank with PyTorch's optimizer: a mean of all weights every so many steps."""

    def wrap(_: Trained, inner: torch.optim.Optimizer) -> tuple[Any, Any]:
        averager = PeriodicModelAverager(period=run.inner_steps)
        # By itself it averages after step 1, then after each period: the last steps never.
        averager.step = 1
        return PostLocalSGDOptimizer(inner, averager), nullcontext()

    inputs, replica = _train_rank(rank, run, wrap)
    return _result(rank, inputs, replica, run.steps // run.inner_steps / run.steps)


def torchft(ranks: Ranks, run: Run) -> dict[str, Any]:
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
        known = replace(run, lighthouse=f"http://127.0.0.1:{port}")
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


def _train_rank(
    rank: int, run: Run, wrap: Wrap, *, reduce: bool = False
) -> tuple[RunInputs, Replica]:
    """Train a quarter of each step's samples; `wrap` returns what steps, and its context.

    Args:
        reduce: gradients are averaged over the ranks at every step.
    """
    inputs, replica, weights = run.open()
    config, layout, plan = inputs.config, inputs.layout, inputs.plan
    assert isinstance(inputs.train, Dataset)
    trained = Trained(layout, weights)
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
            if reduce:
                torch.distributed.all_reduce(torch.from_numpy(gradient))
                gradient /= np.float32(RANKS)
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


def _result(rank: int, inputs: RunInputs, replica: Replica, sent: float) -> dict[str, Any]:
    """Return what a run came to; `sent` is in vectors of all weights an inner step."""
    if rank:
        return {}
    return {**validate(inputs, replica), "bytes_an_inner_step": 4 * inputs.layout.size * sent}
