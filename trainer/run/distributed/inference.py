"""A trained model on several processes at once, for `generate` and `evaluate`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Self

from trainer.checkpoint.trained_model import TrainedModel
from trainer.config.parallel import ParallelConfig
from trainer.config.run import RunConfig
from trainer.config.section import build_settings, parse_assignments
from trainer.model.files import weights_digest
from trainer.model.shards import check_shards
from trainer.replica.backend import Compute
from trainer.replica.base import EvalResult
from trainer.run.distributed.environment import read_environment
from trainer.system.errors import InputError, TrainerError
from trainer.system.process.imports import speed_up_imports
from trainer.system.process.slow_log import log_if_slow

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.data.tokens import Encoded
    from trainer.replica.torch.generator import TorchGenerator
    from trainer.replica.torch.parallel.replica import ParallelReplica

_PATIENCE = 300.0
"""Seconds until all ranks have met."""


def read_parallel(text: str) -> ParallelConfig:
    """Return the strategies of `KEY=VALUE,...`, keys as in section `parallel` of a run config.

    Raises:
        InputError: a key or value is wrong.
    """
    given = parse_assignments(text.split(","), "--parallel")
    return build_settings(ParallelConfig, {}, given, f"--parallel {text}")


class Ranks:
    """This process among those that hold a trained model together.

    They meet when the model is opened, after the checks of flags and data. As a context, it leaves
    them at the end, and says which rank an error is of.

    Args:
        parallel: `--parallel`.
        variables: the environment, by which torchrun or another launcher says which rank this is.

    Raises:
        InputError: no launcher started this process, or the sizes do not fit their number.
    """

    def __init__(
        self, parallel: str, compute: Compute, variables: Mapping[str, str] = os.environ
    ) -> None:
        self.parallel = read_parallel(parallel)
        if not {"RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"} & set(variables):
            raise InputError(
                f"--parallel {parallel}: only one process; start as many as the product of the"
                " sizes, such as `torchrun --nproc-per-node 2 -m trainer ... --parallel tensor=2`"
            )
        if compute.gpu or compute.backend == "wgpu":
            wrong = f"--gpu {compute.gpu}" if compute.gpu else "--gpu-backend wgpu"
            raise InputError(
                f"{wrong}: with --parallel each process takes the CUDA device of its number on its"
                " host, or the CPU; leave it out"
            )
        if compute.resident not in ("auto", "all"):
            raise InputError(
                f"--resident {compute.resident}: with --parallel each process keeps its part of all"
                " layers; leave it out"
            )
        if compute.quantization is not None:
            raise InputError(
                f"--quantization {compute.quantization}: with --parallel each process holds its"
                " part as it was trained; leave it out"
            )
        self._environment = read_environment(variables)
        self._copies = self.parallel.count_copies(self._environment.world_size)
        self._compute = compute
        self._joined = ExitStack()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone prints."""
        return self._environment.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._joined.__exit__(kind, error, trace)
        if isinstance(error, TrainerError) and not self.leads:
            error.args = (f"rank {self._environment.rank}: {error}",)

    def open_generator(self, trained: TrainedModel) -> tuple[TorchGenerator, str]:
        """Return this rank's part of a generator, and nothing to say of its place.

        Raises:
            InputError: the strategies do not generate, or the model cannot be loaded or cut.
        """
        world = self._environment.world_size
        if self.parallel.tensor != world or self.parallel.sequence:
            raise InputError(
                f"--parallel: {world} processes generate only with tensor={world}, which divides"
                " each layer between them"
            )
        device, mesh = self._join_ranks(trained)
        from trainer.replica.torch.parallel.generator import load_parallel_generator

        model = trained.base_dir, trained.config, trained.layout, trained.weights
        return load_parallel_generator(*model, mesh["tensor"], device), ""

    def open_evaluator(self, trained: TrainedModel) -> tuple[RankEvaluator, str]:
        """Return this rank's part of an evaluator, and nothing to say of its place.

        Raises:
            InputError: the model cannot be loaded or cut.
        """
        device, mesh = self._join_ranks(trained)
        from trainer.replica.torch.parallel.replica import ParallelReplica

        replica = ParallelReplica(
            trained.base_dir,
            self._make_config(trained),
            trained.layout,
            mesh,
            device,
            trained.weights,
        )
        return RankEvaluator(replica, f"{self._environment.world_size} x {device.type}"), ""

    def _make_config(self, trained: TrainedModel) -> RunConfig:
        plain = {"sample_prompts": None, "label_smoothing": 0.0, "class_weights": None}
        training = trained.config.training.model_copy(update=plain)  # only a run needs them
        return trained.config.model_copy(update={"parallel": self.parallel, "training": training})

    def _join_ranks(self, trained: TrainedModel) -> tuple[torch.device, DeviceMesh]:
        """Check the model, meet the others and return this rank's device and the mesh."""
        check_shards(trained.base_dir, self._make_config(trained))
        environment = self._environment
        with speed_up_imports("torch"):
            import torch

            from trainer.replica.torch.parallel.mesh import make_mesh
            from trainer.run.distributed.process_group import (
                choose_rank_device,
                open_process_group,
                open_store,
            )
            from trainer.run.distributed.rank_reports import RankReport, gather_rank_reports
        if self._compute.threads is not None:
            torch.set_num_threads(self._compute.threads)
        device = choose_rank_device(environment, self._compute.backend, "")
        facts = {
            "--parallel": self.parallel.model_dump_json(),
            "kind of device": device.type,
            "model": trained.layout.digest,
            "set of trained weights": _config_digest(trained),
            "version of torch": torch.__version__,
        }
        with log_if_slow(f"waiting for all {environment.world_size} processes"):
            store = open_store(environment, _PATIENCE)
            me = RankReport(environment.rank, socket.gethostname(), str(device), facts)
            gather_rank_reports(store, me, environment.world_size, _PATIENCE)
        self._joined.enter_context(
            open_process_group(environment, store, device, self.parallel.timeout)
        )
        return device, make_mesh(self.parallel, environment.world_size, device.type)


def _config_digest(trained: TrainedModel) -> str:
    if trained.weights is None:
        return weights_digest(trained.base_dir)
    return blake2b(trained.weights.tobytes()).hexdigest()


class RankEvaluator:
    """All ranks' parts of a model; each is given the same samples and returns the same sums."""

    def __init__(self, replica: ParallelReplica, device: str) -> None:
        self._replica, self.device = replica, device

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Return the sums over all samples; see `Replica.evaluate`."""
        return self._replica.evaluate(
            [batch[index] for index in self._replica.local_samples(len(batch))]
        )
