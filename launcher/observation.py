"""What a run is doing: the keepers' states and the coordinator's `status.json`, put together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.access import Connection
from launcher.connection import connect
from launcher.plan import LaunchPlan, ProcessPlan
from launcher.runs import Registry, Run
from launcher.supervisor import ProcessState, SessionSupervisor, Supervisor

JOINED = frozenset({"active", "benched"})
"""States in `status.json` of a worker that takes part."""


@dataclass(frozen=True)
class RunView:
    """One look at a run."""

    run: Run
    state: str
    """`starting`, `running`, `recovering` (the coordinator is restarted), `stopping`, `finished`,
    `failed` or `stopped`."""
    reason: str | None
    processes: Mapping[str, ProcessState]
    training: Mapping[str, Any] | None
    """The coordinator's `status.json`; None until it has written one."""

    @property
    def is_live(self) -> bool:
        """Whether anything of the run is kept running."""
        return any(not state.is_over for state in self.processes.values())

    @property
    def joined(self) -> list[int]:
        """The ranks that take part, by the coordinator's word."""
        return sorted(w["rank"] for w in self.members if w.get("state") in JOINED)

    @property
    def members(self) -> list[dict[str, Any]]:
        """What the coordinator says of each worker: `rank`, `state`, `samples`, ..."""
        return list((self.training or {}).get("workers") or ())

    @property
    def missing(self) -> list[ProcessPlan]:
        """The workers that do not take part."""
        joined = set(self.joined)
        return [worker for worker in self.run.plan.workers if worker.rank not in joined]


class Cockpit:
    """A run's hosts: a supervisor for each, and the coordinator's files."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.connections: dict[str, Connection] = {
            host.name: connect(host) for host in run.plan.hosts
        }
        self._supervisors: dict[str, Supervisor] = {
            name: SessionSupervisor(connection, run.run_id)
            for name, connection in self.connections.items()
        }

    def supervisor(self, process: ProcessPlan) -> Supervisor:
        """Return the supervisor of the process's host."""
        return self._supervisors[process.host]

    def state(self, process: ProcessPlan) -> ProcessState:
        """Return what is known about a process."""
        return self.supervisor(process).state(process)

    def last_lines(self, process: ProcessPlan, count: int = 10) -> list[str]:
        """Return the end of a process's newest log that is not empty."""
        supervisor = self.supervisor(process)
        for attempt in reversed(supervisor.attempts(process)):
            text = supervisor.read_log(process, attempt).decode(errors="replace")
            if lines := [line for line in text.splitlines() if line.strip()]:
                return lines[-count:]
        return []

    def observe(self) -> RunView:
        """Look once at everything."""
        plan = self.run.plan
        states = {process.name: self.state(process) for process in plan.processes}
        since = states[plan.coordinator.name].started
        training = read_training(self.connections[plan.coordinator.host], plan, since)
        state = derive_state(states[plan.coordinator.name], training)
        reason = (training or {}).get("reason") or states[plan.coordinator.name].message
        return RunView(self.run, state, reason, states, training)


def derive_state(coordinator: ProcessState, training: Mapping[str, Any] | None) -> str:
    """Return the run's state from its coordinator's process and that one's last words."""
    said = str((training or {}).get("state", "waiting"))
    match coordinator.state:
        case "exited" | "stopped":
            return said if said in ("finished", "failed") else "stopped"
        case "failed" | "lost":
            return "failed"
        case "absent":
            return "stopped"
        case "backoff":
            return "recovering"
        case "stopping":
            return "stopping"
        case _:
            return {"waiting": "starting", "running": "running"}.get(said, "stopping")


def read_training(
    connection: Connection, plan: LaunchPlan, since: float | None
) -> dict[str, Any] | None:
    """Return what the coordinator wrote since its present attempt began; None when nothing.

    A restarted or resumed run finds the words of its earlier life, which say nothing of this one.
    Both times come from the coordinator's host, so clocks need not agree.
    """
    try:
        tree: Any = json.loads(connection.read(f"{plan.output}/status.json"))
    except (OSError, ValueError):
        return None
    if not isinstance(tree, dict) or tree.get("run_id") != plan.run_id:  # pyright: ignore
        return None
    updated: object = tree.get("updated")  # pyright: ignore
    if since is not None and isinstance(updated, int | float) and updated < since:
        return None
    return tree  # pyright: ignore


def live_runs(registry: Registry) -> list[RunView]:
    """Return every run of which something is kept running, the oldest first."""
    return [view for view in (Cockpit(run).observe() for run in registry.all()) if view.is_live]


def find_run(registry: Registry, run_id: str | None) -> Run | None:
    """Return the named run; without a name the newest live one, else the newest at all."""
    if run_id is not None:
        return registry.get(run_id)
    live = live_runs(registry)
    if live:
        return live[-1].run
    runs = registry.all()
    return runs[-1] if runs else None
