"""Stop a run, and verify that none of its processes is left on any host that answers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from launcher.agent.operations import describe_process, find_run, send_signal
from launcher.errors import PartialError, UnreachableError
from launcher.hosts import fleet
from launcher.hosts.base import Connection
from launcher.hosts.fleet import REACH, format_error
from launcher.inventory.hosts import Host
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.systemd import open_supervisor
from launcher.runs.records.run import Run
from launcher.session.processes import ProcessIdentity
from launcher.session.spec import LONGEST_SAVE, SessionSpec

GRACE = SessionSpec.grace_seconds + 5.0
"""Seconds for a process to end by itself: its supervisor's grace and more. Saves come on top."""
_EXIT_GRACE = 1.0
"""Seconds for a process that is already ending, such as a supervisor that wrote its last state."""
_SWEEP_DEADLINE = 10.0


@dataclass(frozen=True)
class TeardownResult:
    """The result of `tear_down`."""

    run_id: str
    stopped: tuple[str, ...]
    """Supervised processes that were stopped."""
    stragglers: tuple[str, ...]
    """Other processes of the run that were found and killed."""
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hosts that do not answer or still run something, each with the reason."""

    def require_all(self) -> None:
        """Raise an error if a host may still run a part of the run.

        Raises:
            PartialError: names every such host and the remedy.
        """
        if self.left:
            lines = list(self.left.values())
            raise PartialError(
                f"run {self.run_id}: not stopped on {', '.join(self.left)}: {lines[0]}; processes "
                f"there continue; repeat when it answers: launch cluster down --run {self.run_id}",
                lines[1:],
            )


def tear_down(run: Run, grace: float = GRACE, why: str = "") -> TeardownResult:
    """Stop all processes of a run on all hosts at once; if nothing runs, do nothing.

    The leader stops first: it finishes its step and saves, and a coordinator ends its workers. An
    unreachable host delays no other and is listed in the ending. `why`, a
    failed start's reason, is kept.
    """

    def leave_stop_mark(host: Host, connection: Connection) -> None:
        """Tell supervisors to start no new process; the first reason is kept."""
        path = run.stop_mark(host, connection)
        if connection.exists(run.run_folder(host, connection)) and not connection.exists(path):
            connection.write(path, why.encode())

    answers = fleet.ask_hosts(run.hosts, leave_stop_mark, REACH)
    gone = {n: e for n, e in answers.errors.items() if isinstance(e, UnreachableError)}
    hosts = [host for host in run.hosts if host.name not in gone]
    stopped: set[str] = set()
    for group in ([run.plan.leader], run.plan.followers):
        here = {process.host for process in group}
        stop = partial(_stop_processes, run, group, grace)
        deadline = REACH + grace + LONGEST_SAVE
        ended = fleet.ask_hosts([host for host in hosts if host.name in here], stop, deadline)
        stopped |= {name for names in ended.found.values() for name in names}
    sweep = partial(_kill_leftovers, run)
    swept = fleet.ask_hosts(hosts, sweep, REACH + _SWEEP_DEADLINE)
    return TeardownResult(
        run.run_id,
        tuple(process.name for process in run.plan.processes if process.name in stopped),
        tuple(straggler for found in swept.found.values() for straggler in found),
        {name: format_error(name, error) for name, error in {**gone, **swept.errors}.items()},
    )


@contextlib.contextmanager
def defer_signals() -> Generator[None]:
    """Defer signals that would end the launcher during the cleanup."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_processes(
    run: Run, group: Sequence[ProcessPlan], grace: float, host: Host, connection: Connection
) -> list[str]:
    """Stop those of a group that are on a host; return the ones that were still running."""
    supervisor = open_supervisor(connection, run.run_id, home=run.run_folder(host, connection))
    here = [process for process in group if process.host == host.name]
    living = [process.name for process in here if not supervisor.read_state(process).is_over]
    supervisor.stop_processes(here, grace)
    return living


def _kill_leftovers(run: Run, host: Host, connection: Connection) -> list[str]:
    """Kill processes with the run's id on a host until none is left; then remove its keys."""
    found: dict[ProcessIdentity, str] = {}
    patient_until = time.monotonic() + _EXIT_GRACE
    until = patient_until + _SWEEP_DEADLINE - 1.0
    while left := connection.ask(find_run, run.run_id):
        if time.monotonic() > until:
            names = ", ".join(connection.ask(describe_process, process) for process in left)
            raise PartialError(f"cannot be stopped: {names}")
        for process in left if time.monotonic() > patient_until else ():
            found.setdefault(process, connection.ask(describe_process, process))
            connection.ask(send_signal, process, signal.SIGKILL)
        time.sleep(0.05)
    supervisor = open_supervisor(connection, run.run_id, home=run.run_folder(host, connection))
    for process in run.plan.processes:
        if process.host == host.name:
            keys = f"{supervisor.process_folder(process)}/tls"
            for name in connection.list_folder(keys):
                connection.remove_file(f"{keys}/{name}")
    return list(found.values())
