"""Start a rank, train, and end it with the exit code of its error."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trainer.config.exchange import RING_NOTE
from trainer.run.distributed.environment import Environment
from trainer.run.distributed.loop import OF_ALL, DistributedRun
from trainer.run.distributed.process_group import choose_rank_device, open_process_group
from trainer.run.distributed.rank_reports import RankReport, gather_rank_reports
from trainer.run.distributed.rank_watchdog import RankWatch
from trainer.system.backends import RequestedBackend
from trainer.system.process.stop_signals import StopRequest

if TYPE_CHECKING:
    from trainer.run.inputs import RunInputs

log = logging.getLogger(__name__)

Explaining = Callable[[], AbstractContextManager[None]]
Make = Callable[[Store, list[RankReport], torch.device, StopRequest, Explaining], DistributedRun]


def run_rank(
    inputs: RunInputs,
    environment: Environment,
    *,
    backend: RequestedBackend,
    gpu: str,
    threads: int | None,
    stop: StopRequest,
    meet: Callable[[], Store],
    make: Make,
) -> int:
    """Train as one rank and return the exit code.

    Args:
        meet: returns the store in which the ranks meet.
        make: composes the run, once the ranks have met.

    Raises:
        InputError: the device, model or output folder cannot be used.
        UnreachableError: a rank is missing, or was lost.
        RefusedError: a rank has another model, data, config, version, or weights.
        NonFiniteError: NaN or Inf halted the run.
        StorageError: the disk failed.
        InUseError: another process writes the output folder.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    exchange = inputs.config.exchange
    patience = exchange.join_deadline
    device = choose_rank_device(environment, backend, gpu)
    store = meet()
    me = RankReport(
        environment.rank, socket.gethostname(), str(device), _common_facts(inputs, device)
    )
    members = gather_rank_reports(store, me, environment.world_size, patience)
    if exchange.is_ring and environment.rank == 0:
        log.info("%s", RING_NOTE)
    output = Path(inputs.config.output)
    watch = RankWatch(store, me.rank, [member.host for member in members], me.device, output)
    timeout = inputs.config.parallel.timeout
    with watch.watch_ranks(), open_process_group(environment, store, device, timeout):
        made = make(store, members, device, stop, watch.explain_errors)
        recorder = made.recorder
        try:
            with (
                recorder.closed_on_failure() if recorder else nullcontext(),
                watch.explain_errors(),
            ):
                reason, code = made.run()
        except OF_ALL as error:
            if environment.rank > 0:  # rank 0 prints it
                return error.exit_code
            raise
        if recorder is not None:
            code = recorder.close(code, reason)
        # A rank that leaves ends the job's store, or under torchrun the others' grace.
        verdict = torch.tensor(code)
        dist.broadcast(verdict, 0)
        return int(verdict)


def _common_facts(inputs: RunInputs, device: torch.device) -> dict[str, str]:
    job = inputs.job
    return {
        "version of Motley": job.motley_version,
        "version of torch": torch.__version__,
        "kind of device": _device_kind(device) if inputs.config.exchange.is_ring else device.type,
        "exchange.topology": inputs.config.exchange.topology,
        "config": job.config_digest,
        "section parallel": json.dumps(inputs.config.parallel.model_dump(), sort_keys=True),
        "run id": job.run_id,
        "trainable set": job.layout_digest,
        "model": job.model_digest,
        "data": job.data_digest,
    }


def _device_kind(device: torch.device) -> str:
    """Return what the devices of a ring have in common: its slowest one sets the pace of all."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
