"""A run that no launcher started, by the output folder of `trainer finetune` on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.errors import ConfigError
from launcher.hosts.fleet import LOOK
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.plan.plan import COORDINATOR, LaunchPlan, ProcessPlan
from launcher.runs.processes.session import ProcessState
from launcher.runs.records.run import Run, is_run_id
from launcher.runs.records.self_reports import read_report
from launcher.runs.status import OVER, RunMonitor, RunView
from launcher.session.processes import identify_process


def is_output(path: Path) -> bool:
    """Return whether a path is a folder in which a run reports its state."""
    return (path / "status.json").is_file()


def read_output(folder: Path) -> RunView:
    """Return a run as it reports itself in its output folder.

    Raises:
        ConfigError: its report cannot be used.
    """
    training = read_report(LocalConnection(), str(folder / "status.json"))
    run_id = str((training or {}).get("run_id"))
    if training is None or not is_run_id(run_id):
        raise ConfigError(f"{folder / 'status.json'}: not a report of a run")
    state, reason = str(training.get("state")), training.get("reason")
    if state not in OVER:
        pid = training.get("pid")
        state = "running" if isinstance(pid, int) and identify_process(pid) else "failed"
        reason = reason if state == "running" else "its process ended without a report"
    process = ProcessPlan(
        name=COORDINATOR,
        role=COORDINATOR,
        host="localhost",
        device="",
        backend="",
        threads=None,
        argv=(),
        env={},
        folder=str(folder),
    )
    hosts = (Host(name="localhost", connection="local"),)
    output = str(folder.resolve())
    plan = LaunchPlan(run_id=run_id, output=output, hosts=hosts, processes=(process,))
    ended = {"completed": "exited", "running": "running", "stopped": "stopped"}
    states = {COORDINATOR: ProcessState(state=ended.get(state, "failed"))}
    run = Run(plan, 0.0, hosts, is_launched=False)
    return RunView(run, state, reason, states, training)


class OutputMonitor(RunMonitor):
    """Observes a run by its output folder; it has no supervisors.

    Args:
        run_id: to tell it from others; default: as it reports itself.

    Raises:
        ConfigError: the folder holds no report of a run.
    """

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        run = read_output(folder).run
        plan = replace(run.plan, run_id=run_id or run.run_id)
        super().__init__(replace(run, plan=plan))
        self._folder = folder

    def observe(
        self,
        deadline: float = LOOK,  # noqa: ARG002 - the caller knows a monitor, and gives it one
        on_late: Callable[[RunView], None] | None = None,  # noqa: ARG002 - no host is late here
    ) -> RunView:
        """Read its report; there is no host to wait for."""
        return replace(read_output(self._folder), run=self.run)
