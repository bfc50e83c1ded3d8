"""A launch plan: every process of a run, with its host and command. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from launcher.inventory.hosts import Host

PLAN_SCHEMA = "motley.plan/2"
COORDINATOR = "coordinator"

Role = Literal["coordinator", "worker", "student", "teacher", "evaluator"]


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process of a run."""

    name: str
    role: Role
    rank: int | None = None
    """Position of a worker in the run, by inventory order; None for any other process."""
    local_rank: int | None = None
    """Position among the workers of its host."""
    host: str
    device: str
    """The device's id, or `ID+ID (STRATEGY)` of a replica group; empty for the coordinator."""
    members: tuple[str, ...] = ()
    """The ids of a replica group's devices, by their rank in it."""
    strategy: str = ""
    """How a replica group holds its replica."""
    backend: str
    threads: int | None
    address: str = ""
    """Where the coordinator listens, or what the worker connects to: `ADDRESS:PORT`."""
    argv: tuple[str, ...]
    """The command; it never carries a secret."""
    env: Mapping[str, str]
    folder: str
    """On its host: spec, state, logs and certificates of this process."""
    certificate_names: tuple[str, ...] = ()
    """IP addresses and host names its certificate is good for; without them it gets none."""
    report_file: str = ""
    """A JSON file on its host, which may be a share, with a process's own report: a teacher's."""
    required_paths: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]]
    )
    """Paths that must exist before a distillation starts, by the check for them."""
    writable_folders: Mapping[str, str] = field(default_factory=dict[str, str])
    """Folders that it must be able to write to, likewise."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The ids of all its devices."""
        return self.members or ((self.device,) if self.device else ())

    @property
    def state_folder(self) -> str:
        """Where its host keeps its runs."""
        return str(PurePosixPath(self.folder).parents[3])


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One run on a cluster: a fine-tune, or a distillation, whose processes share only files."""

    run_id: str
    output: str
    """Folder of checkpoints, metrics and status, on the leader's host."""
    bind_address: str = ""
    port: int | None = None
    """Where the coordinator listens; None in a run without sockets."""
    hosts: tuple[Host, ...]
    """Only the hosts that take part."""
    processes: tuple[ProcessPlan, ...]
    """The leader first, then the workers by rank, or the teachers and the evaluator."""

    @property
    def leader(self) -> ProcessPlan:
        """The process whose end is the end of the run: the coordinator, or the student."""
        return self.processes[0]

    @property
    def followers(self) -> tuple[ProcessPlan, ...]:
        """All processes but the leader."""
        return self.processes[1:]

    @property
    def workers(self) -> tuple[ProcessPlan, ...]:
        """The workers by rank."""
        return tuple(process for process in self.processes if process.role == "worker")

    def device_memory(self, process: ProcessPlan) -> int | None:
        """Return the bytes that a process's replica may take on a GPU; None if they are unknown.

        Of a replica group these are the smallest card's, as each holds the whole model, or the sum
        if the group shares it.
        """
        known = self.get_host(process.host).devices or ()
        sizes = [device.memory for device in known if device.id in process.devices]
        found = [size for size in sizes if size is not None]
        if not found:
            return None
        return sum(found) if process.strategy in ("fsdp", "tensor") else min(found)

    def get_host(self, name: str) -> Host:
        """Return the host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def find_process(self, name: str) -> ProcessPlan | None:
        """Return the process of that name, None when there is none."""
        return next((process for process in self.processes if process.name == name), None)

    def to_json(self) -> bytes:
        """Return the plan as the file that the run registry keeps."""
        return json.dumps({"schema": PLAN_SCHEMA, **asdict(self)}, indent=1).encode()


def unit_name(run_id: str, process: ProcessPlan) -> str:
    """Return the unit's name of a process."""
    template = "coordinator" if process.role == "coordinator" else "worker"
    return f"motley-{template}@{run_id}:{process.name}.service"
