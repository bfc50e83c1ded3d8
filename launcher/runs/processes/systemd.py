"""Processes of a run as systemd units: the same supervisor, started by the host's systemd.

    motley-coordinator@<run id>:coordinator.service
    motley-worker@<run id>:worker-2.service
    motley-worker@<run id>:student.service

Every process that computes is a worker to systemd: a student, a teacher and an evaluator need the
same rights.

The recipe installs the templates and the one root command that starts and stops them. A unit gives
a process its cgroup and its limits, and brings it back after a reboot. Restarts, logs and
state.json stay the supervisor's (`session/process_supervisor.py`); systemd is asked only what
the supervisor cannot report: that it is about to restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from launcher.agent.checks.unit_states import UnitStates, show_units
from launcher.errors import LauncherError, PartialError
from launcher.hosts.base import Connection
from launcher.hosts.fleet import ask_each
from launcher.inventory.hosts import Host
from launcher.plan.plan import ProcessPlan, unit_name
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from launcher.session.spec import LONGEST_SAVE, RestartPolicy

_START_DEADLINE = 30.0
_KILL_DEADLINE = 15.0
_COMING = frozenset({"active", "activating", "reloading"})


class SystemdSupervisor(SessionSupervisor):
    """Processes under supervisors that systemd runs; start and stop go through `control_unit`."""

    def start_supervisor(self, process: ProcessPlan) -> None:
        """Start and enable the unit: a rebooted host resumes an unfinished process.

        Raises:
            PreflightError: the host refuses.
        """
        self.connection.control_unit("start", unit_name(self.run_id, process), _START_DEADLINE)

    def start_error(self, process: ProcessPlan) -> PartialError:
        """Return the error of a unit whose supervisor gives no sign of life."""
        unit = unit_name(self.run_id, process)
        properties = self._show_units([process]).units.get(unit, {})
        keys = ("ActiveState", "SubState", "Result")
        words = ", ".join(properties[key] for key in keys if key in properties)
        return PartialError(
            f"{process.name}: its unit did not start ({words or 'unknown to systemd'}); "
            f"see there: journalctl -u '{unit}'"
        )

    def read_state(self, process: ProcessPlan) -> ProcessState:
        """Return what the supervisor wrote; `starting` if systemd is about to start it again."""
        state = super().read_state(process)
        if state.state not in ("lost", "absent"):
            return state
        shown = self._show_units([process])
        properties = shown.units.get(unit_name(self.run_id, process), {})
        rebooted = state.supervisor is not None and state.supervisor.boot != shown.boot
        due = rebooted and properties.get("UnitFileState") == "enabled"  # but not its turn yet
        coming = properties.get("ActiveState") in _COMING
        if coming or (due and properties.get("ActiveState") == "inactive"):
            again = super().read_state(process)  # its supervisor may have written something since
            return (
                again if again.state not in ("lost", "absent") else replace(again, state="starting")
            )
        return state

    def stop_processes(self, plans: Iterable[ProcessPlan], grace: float) -> None:
        """Stop and disable every unit at once; after `grace` their cgroups are killed."""
        processes = list(plans)
        until = time.monotonic() + grace
        shown = self._show_units(processes).units
        wanted = {
            unit: process
            for process in processes
            if _is_wanted(shown.get(unit := unit_name(self.run_id, process), {}))
        }
        # A refusal or timeout of systemd is not final: see below.
        host = Host(name=self.connection.host)
        ask_each(
            {
                unit: (host, partial(self._stop_unit, unit, each, grace))
                for unit, each in wanted.items()
            },
            grace + LONGEST_SAVE + _KILL_DEADLINE,
            lambda _host: self.connection,
        )
        # Supervisors that are not systemd's: started before the host got its units.
        super().stop_processes(processes, max(0.0, until - time.monotonic()))

    def _stop_unit(self, unit: str, process: ProcessPlan, grace: float, there: Connection) -> None:
        try:
            there.control_unit("stop", unit, max(1.0, grace))
        except LauncherError:
            if self._is_saving(process):
                self.wait_until_stopped([process], grace)
            there.control_unit("kill", unit, _KILL_DEADLINE)

    def _show_units(self, processes: Sequence[ProcessPlan]) -> UnitStates:
        names = [unit_name(self.run_id, process) for process in processes]
        return self.connection.ask(show_units, names)


def open_supervisor(
    connection: Connection, run_id: str, restart: RestartPolicy | None = None, home: str = ""
) -> SessionSupervisor:
    """Return the supervisor of a run's processes on one host: units where it has them.

    `home` is the run's folder there; only a plan that was made here has it.
    """
    kind = SystemdSupervisor if connection.units else SessionSupervisor
    return kind(connection, run_id, restart, home=home)


def _is_wanted(properties: dict[str, str]) -> bool:
    """Whether systemd runs a unit, or would at the next boot."""
    active = properties.get("ActiveState", "inactive") not in ("inactive", "failed")
    return active or properties.get("UnitFileState") == "enabled"
