"""Whole runs in ranks: as `trainer finetune --distributed` composes them, and as it does alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.trainer.replica.torch.parallel.one_process import device, mesh_of, samples
from trainer.checkpoint.trained_model import load_trained
from trainer.config.run import RunConfig, load_config
from trainer.replica.sampling import Sampling
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.replica import TorchReplica
from trainer.run.composition import roles
from trainer.run.distributed.environment import Environment
from trainer.run.distributed.rank_reports import RankReport
from trainer.run.inputs import read_inputs
from trainer.system.process.stop_signals import StopRequest

if TYPE_CHECKING:
    from trainer.run.distributed.loop import DistributedRun


def run_config(folder: str, data: str, output: str, settings: dict[str, Any]) -> RunConfig:
    return load_config(
        None,
        {
            "model.path": folder,
            "data.train": data,
            "output": output,
            "num_classes": None if settings.get("task") == "causal-lm" else 3,
            "data.max_seq_len": 32,
            "training.batch_size": 6,
            "training.micro_batch_size": 8,
            "optimizer.learning_rate": 1e-3,
            **settings,
        },
    )


def together(
    folder: str, data: str, output: str, settings: dict[str, Any], until: int | None = None
) -> str:
    """Run on this world's ranks and return how it ended.

    Args:
        until: the last rank asks for a stop once so many steps are done.
    """
    from trainer.run.composition.distributed import (
        make_distributed,  # in ranks alone: it takes a second
    )

    config = run_config(folder, data, output, settings)
    rank, world = dist.get_rank(), dist.get_world_size()
    here = Environment(rank, world, rank, "127.0.0.1", 1, "a test")
    members = [RankReport(number, "host", str(device()), {}) for number in range(world)]
    default = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"{output}-{until}", default)
    inputs = read_inputs(config, "test")
    stop = StopAt(until) if until is not None and rank == world - 1 else StopRequest()
    made = make_distributed(inputs, here, None, store, members, device(), stop)
    if isinstance(stop, StopAt):
        stop.run = made
    reason, exit_code = "", 1
    try:
        reason, exit_code = made.run()
    finally:
        if made.recorder is not None:
            made.recorder.close(exit_code, reason)
    dist.barrier()
    return reason


def together_until(folder: str, data: str, output: str, settings: dict[str, Any]) -> str:
    """Run with `stop` among the settings, which is `until`."""
    until = settings.pop("stop")
    return together(folder, data, output, settings, until)


class StopAt(StopRequest):
    """Asks for a stop once a run has done its steps."""

    run: DistributedRun | None = None

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def __bool__(self) -> bool:
        if self.run is not None and self.run.step >= self._step:
            self.request("enough")
        return bool(self.reason)


def alone(folder: str, data: str, output: str, settings: dict[str, Any]) -> int:
    """Run in this process as `trainer finetune` does."""
    config = run_config(folder, data, output, settings)
    return roles.run_local(config, "test", roles.Placement([], "cpu", 1, None, None))


def evaluated(output: str, settings: dict[str, Any]) -> float:
    """Return the mean loss of a trained model, by this world's strategy or by one process."""
    trained = load_trained(Path(output))
    chosen = run_config(str(trained.base_dir), "-", "-", settings).parallel
    config = trained.config.model_copy(update={"parallel": chosen})
    batch = samples(config, 8, 300)
    if config.num_classes is not None:
        batch = [sample for sample in batch if sample.labels < config.num_classes]
    if dist.get_world_size() == 1:
        replica = TorchReplica(trained.base_dir, config, trained.layout, str(device()), threads=1)
        if trained.weights is not None:
            replica.write_trainable(trained.weights)
        found = replica.evaluate(batch)
    else:
        from trainer.replica.torch.parallel.replica import ParallelReplica

        mesh = mesh_of(chosen.pipeline.stages, chosen.tensor)
        model = trained.base_dir, config, trained.layout
        parallel = ParallelReplica(*model, mesh, device(), trained.weights)
        found = parallel.evaluate([batch[index] for index in parallel.local_samples(len(batch))])
    return found.loss_sum / found.weight


def continued(output: str) -> list[list[int]]:
    """Return what a trained model makes of prompts, in ranks that share each layer, or in one."""
    trained = load_trained(Path(output))
    model = trained.base_dir, trained.config, trained.layout, trained.weights
    if dist.get_world_size() == 1:
        generator = load_generator(*model, str(device()), threads=1)
    else:
        from trainer.replica.torch.parallel.generator import load_parallel_generator

        generator = load_parallel_generator(*model, mesh_of(1, 2)["tensor"], device())
    prompts = [[7, 8, 9, 10, 11], [75], [200, 3]]
    return generator.generate(prompts, max_new_tokens=6, sampling=Sampling())


def losses(output: Path) -> list[float]:
    """Return the loss of every step."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]
