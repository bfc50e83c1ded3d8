"""A launch plan: every process of a run, with its host and command. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from launcher.inventory.hosts import Host, host_from_tree

PLAN_SCHEMA = "motley.plan/1"
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
    """The device's id; empty for the coordinator."""
    backend: str
    threads: int | None
    address: str = ""
    """Where the coordinator listens, or what the worker connects to: `ADDRESS:PORT`."""
    argv: tuple[str, ...]
    """The command; it never carries a secret."""
    env: Mapping[str, str]
    folder: str
    """On its host: spec, state, logs and certificates of this process."""
    names: tuple[str, ...] = ()
    """IP addresses and host names its certificate is good for; without them it gets none."""
    beat: str = ""
    """A JSON file on its host, which may be a share, with a process's own report: a teacher's."""
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Paths that must exist before a distillation starts, by the check for them."""
    writes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Folders that it must be able to write to, likewise."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One run on a cluster: a fine-tune, or a distillation, whose processes share files alone."""

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

    def host(self, name: str) -> Host:
        """Return the host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def process(self, name: str) -> ProcessPlan | None:
        """Return the process of that name, None when there is none."""
        return next((process for process in self.processes if process.name == name), None)

    def to_json(self) -> bytes:
        """Return the plan as the file that the run registry keeps."""
        return json.dumps({"schema": PLAN_SCHEMA, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> LaunchPlan:
        """Read a plan back; raises ValueError, KeyError or TypeError when it is not one."""
        tree: dict[str, Any] = json.loads(text)
        if tree.pop("schema") != PLAN_SCHEMA:
            raise ValueError(f"not a {PLAN_SCHEMA} file")
        hosts = tuple(host_from_tree(host) for host in tree.pop("hosts"))
        processes = tuple(_process(process) for process in tree.pop("processes"))
        return cls(hosts=hosts, processes=processes, **tree)


def _process(tree: dict[str, Any]) -> ProcessPlan:
    argv, names, reads = tree.pop("argv"), tree.pop("names"), tree.pop("reads", {})
    return ProcessPlan(
        argv=tuple(argv),
        names=tuple(names),
        reads={check: tuple(paths) for check, paths in reads.items()},
        **tree,
    )


def unit_of(run_id: str, process: ProcessPlan) -> str:
    """Return the unit's name of a process."""
    template = "coordinator" if process.role == "coordinator" else "worker"
    return f"motley-{template}@{run_id}:{process.name}.service"
