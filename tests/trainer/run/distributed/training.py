"""Whole runs in ranks: as `trainer finetune --distributed` composes them, and as it does alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.trainer.replica.torch.parallel.one_process import device
from trainer.config.run import RunConfig, load
from trainer.run.composition import roles
from trainer.run.distributed.environment import Environment
from trainer.run.distributed.roll_call import RankReport
from trainer.run.inputs import read_inputs
from trainer.system.process.stopping import Stop

if TYPE_CHECKING:
    from trainer.run.distributed.loop import DistributedRun


def run_config(folder: str, data: str, output: str, settings: dict[str, Any]) -> RunConfig:
    return load(
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
    stop = StopAt(until) if until is not None and rank == world - 1 else Stop()
    made = make_distributed(inputs, here, store, members, device(), stop)
    if isinstance(stop, StopAt):
        stop.run = made
    reason, exit_code = made.run()
    if made.recorder is not None:
        made.recorder.close(exit_code, reason)
    dist.barrier()
    return reason


def together_until(folder: str, data: str, output: str, settings: dict[str, Any]) -> str:
    """Run with `stop` among the settings, which is `until`."""
    until = settings.pop("stop")
    return together(folder, data, output, settings, until)


class StopAt(Stop):
    """Asks for a stop once a run has done its steps."""

    run: DistributedRun | None = None

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def __bool__(self) -> bool:
        if self.run is not None and self.run.step >= self._step:
            self.ask("enough")
        return bool(self.reason)


def alone(folder: str, data: str, output: str, settings: dict[str, Any]) -> int:
    """Run in this process as `trainer finetune` does."""
    config = run_config(folder, data, output, settings)
    return roles.run_local(config, "test", roles.Placement([], "cpu", 1, None, None))


def losses(output: Path) -> list[float]:
    """Return the loss of every step."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]
