"""Create a replica from the devices of a replica group, as in `trainer.run.composition.run`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trainer.config.parallel import GroupStrategy
from trainer.replica.backend import ReplicaChoice
from trainer.run.distributed.group.member import run_member
from trainer.run.distributed.group.processes import Members
from trainer.run.distributed.group.setup import GroupSetup
from trainer.run.inputs import RunInputs
from trainer.system.backends import RequestedBackend
from trainer.system.process.slow_log import log_if_slow

log = logging.getLogger(__name__)


def start_group(
    backend: RequestedBackend, gpus: Sequence[str], strategy: GroupStrategy, threads: int | None
) -> Callable[[RunInputs], ReplicaChoice]:
    """Start the members of a group, and return what opens its replica over them.

    To be called while this process, the leader, has neither a device nor a thread.

    Args:
        backend: `auto` is cuda, since the devices are named.
        gpus: of all processes by rank, the leader's first; on the CPU their number counts.
        threads: of each process.

    Raises:
        InputError: this system has no replica groups; when the replica is opened, a device is not
            available, or the model cannot be used, or not with this strategy, or does not fit.
        RefusedError: when the replica is opened, a member has another config, model or torch.
    """
    backend = "cuda" if backend == "auto" else backend
    members = Members(["cpu"] * len(gpus) if backend == "cpu" else gpus, run_member)

    def open_replica(inputs: RunInputs) -> ReplicaChoice:
        setup = GroupSetup(
            config=inputs.config,
            model_dir=inputs.model_dir,
            backend=backend,
            strategy=strategy,
            devices=members.devices,
            threads=threads,
            store=members.store,
        )
        setup.check_strategy()
        with log_if_slow("opening the group"):
            from trainer.run.distributed.group.replica import GroupReplica

            replica = GroupReplica(setup, members)
        log.info("replica on %s", replica.device)
        return ReplicaChoice(replica, backend, "")

    return open_replica
