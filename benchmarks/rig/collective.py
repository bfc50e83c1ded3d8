"""One rank of gloo, NCCL or MPI: `python -P -m benchmarks.rig.collective SPEC`.

It does what the exchange's workers do: sums of one gradient, or steps of the training, in which a
block's sum begins as soon as backward has finished it. Its stamps go to a file, since mpiexec
mixes what ranks print.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig import training
from benchmarks.rig.interface import counted
from benchmarks.rig.member import Commands
from trainer.data.order import permute_epoch
from trainer.exchange.protocol.schedule import StepPlan
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import AdamW, TrainState, weights_digest
from trainer.optimizer.learning_rate import compute_learning_rate

Kind = Literal["gloo", "nccl", "mpi"]
Vector = NDArray[np.float32] | NDArray[np.int16]
"""bf16 as the integers of its bits."""


@dataclass(frozen=True)
class CollectiveSpec:
    """The arguments of a rank; all ranks share most of them."""

    kind: Kind
    world: int
    address: str
    """Where ranks meet: `host:port`; MPI's meet through mpiexec."""
    interface: str
    model: str
    """Folder of what trains."""
    elements: int
    """Of the gradient that is summed otherwise."""
    steps: int
    batch: int
    results: str
    """Folder for each rank's file."""
    trains: bool
    """Train after the sums of one gradient, in the same processes: their start takes longest."""
    codec: Literal["fp32", "bf16"] = "fp32"
    """Of sums; bf16 by gloo and NCCL alone."""
    rank: int = 0

    def of_rank(self, rank: int) -> list[str]:
        """Return the command line of a rank."""
        words = json.dumps(asdict(replace(self, rank=rank)))
        return [sys.executable, "-P", "-m", "benchmarks.rig.collective", words]

    def result(self, rank: int) -> Path:
        """Return the file of a rank."""
        return Path(self.results) / f"{self.kind}-{rank}.json"


class Group(Protocol):
    """Sums vectors of all ranks in place."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def begin(self, vector: Vector) -> Callable[[], object]:
        """Begin a sum and return what waits for it."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class TorchGroup:
    """gloo or NCCL, by torch.distributed; NCCL's vectors pass through the device."""

    def __init__(self, spec: CollectiveSpec) -> None:
        import torch
        import torch.distributed as dist

        variable = "GLOO_SOCKET_IFNAME" if spec.kind == "gloo" else "NCCL_SOCKET_IFNAME"
        os.environ[variable] = spec.interface  # each would take another one
        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        self._device = torch.device("cuda", spec.rank) if spec.kind == "nccl" else None
        # By address: gloo's threads must not be the last to hold an array of Python's.
        self._lent: dict[int, Any] = {}
        if self._device is not None:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            spec.kind,
            init_method=f"tcp://{spec.address}",
            rank=spec.rank,
            world_size=spec.world,
            device_id=self._device,
        )

    def barrier(self) -> None:
        """See `Group.barrier`."""
        self._dist.barrier()

    def begin(self, vector: Vector) -> Callable[[], object]:
        """See `Group.begin`."""
        host = self._lent[vector.ctypes.data] = self._torch.from_numpy(vector)
        if vector.dtype == np.int16:
            host = host.view(self._torch.bfloat16)
        there = host if self._device is None else host.to(self._device)
        work: Any = self._dist.all_reduce(there, async_op=True)

        def finish() -> None:
            work.wait()
            if self._device is not None:
                host.copy_(there)

        return finish

    def close(self) -> None:
        """See `Group.close`."""
        self._dist.barrier()
        self._dist.destroy_process_group()  # without it every other exit is a SIGABRT


class MpiGroup:
    """MPI's world, by mpi4py."""

    def __init__(self, spec: CollectiveSpec) -> None:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]  # of an extra

        self._mpi: Any = MPI
        self._world = self._mpi.COMM_WORLD
        if self._world.size != spec.world:
            raise SystemExit(f"MPI has started {self._world.size} ranks, not {spec.world}")

    def barrier(self) -> None:
        """See `Group.barrier`."""
        self._world.Barrier()

    def begin(self, vector: Vector) -> Callable[[], object]:
        """See `Group.begin`."""
        return self._world.Iallreduce(self._mpi.IN_PLACE, vector).Wait

    def close(self) -> None:
        """See `Group.close`."""
        self._world.Barrier()


def main() -> None:
    """Be the rank that the command line describes."""
    spec = CollectiveSpec(**json.loads(sys.argv[1]))
    if spec.kind == "mpi":
        group: Group = MpiGroup(spec)  # ends with mpiexec
    else:
        Commands()  # ends this process when the one that measures has ended
        group = TorchGroup(spec)
    found = reduce(spec, group)
    if spec.trains:
        found["training"] = train(spec, group)
    spec.result(spec.rank).write_text(json.dumps(found), encoding="utf-8")
    group.close()


def reduce(spec: CollectiveSpec, group: Group) -> dict[str, Any]:
    """Sum a gradient again and again; return the stamps of each time."""
    gradient: Vector = np.zeros(spec.elements, np.float32)
    if spec.codec == "bf16":
        gradient = np.zeros(spec.elements, np.int16)
    stamps: list[dict[str, float]] = []
    for _ in range(spec.steps):
        group.barrier()
        began = time.monotonic()
        group.begin(gradient)()
        stamps.append({"first_send": began, "last_average": time.monotonic(), **counted()})
    return {"stamps": stamps}


def train(spec: CollectiveSpec, group: Group) -> dict[str, Any]:
    """Train as the exchange's workers do; return stamps, the last loss and the weights' hash."""
    model, plan = Path(spec.model), StepPlan(spec.batch * spec.steps, spec.batch, 1, spec.steps)
    config = training.config(model, {})
    layout = build_layout(model, config)
    replica = training.open_replica(model, config, layout, spec.rank)
    state = TrainState.create(initial_weights(layout, model, config))
    optimizer = AdamW(config.optimizer, layout)
    samples = training.RandomSamples(spec.batch * spec.steps)
    order = permute_epoch(config.training.seed, 0, len(samples))
    gradient, stamps = np.empty(layout.size, np.float32), list[dict[str, float]]()
    share, weight, total = spec.batch // spec.world, spec.batch * (training.LENGTH - 1), 0.0
    under_way: list[Callable[[], object]] = []

    def on_block(index: int, values: NDArray[np.float32]) -> None:
        block = layout.blocks[index]
        part = gradient[block.start : block.stop]
        part[:] = values
        under_way.append(group.begin(part))

    group.barrier()
    for step in range(spec.steps):
        replica.write_trainable(state.weights)
        under_way.clear()
        first = plan.find_samples(step).start + share * spec.rank
        batch = [samples[int(order[place])] for place in range(first, first + share)]
        result = replica.forward_backward(batch, on_block)
        for finish in under_way:
            finish()
        np.divide(gradient, np.float32(weight), out=gradient)
        rate = compute_learning_rate(step, plan.total_steps, config.optimizer)
        optimizer.apply(state, gradient, rate, 1.0)
        stamps.append({"committed": time.monotonic(), **counted()})
        total = result.loss_sum
    loss = np.array([total / weight], np.float32)
    group.begin(loss)()
    return {"stamps": stamps, "loss": float(loss[0]), "digest": weights_digest(state.weights)}


if __name__ == "__main__":
    main()
