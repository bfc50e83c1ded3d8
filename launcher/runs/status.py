"""The status of a run: the states of its supervisors, and its processes' reports.

All hosts are queried concurrently. A host that does not answer delays a view by `fleet.LOOK` and
its processes are `unreachable`; everything else is shown. A view that is shown once is completed by
what late hosts answer until their logins' deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from launcher.agent.operations import list_unfinished_runs
from launcher.errors import UnreachableError
from launcher.hosts import fleet, ssh
from launcher.hosts.base import Connection
from launcher.hosts.fleet import LOOK, REACH, Answers, ask_each, format_error
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.processes.log_pages import last_lines
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from launcher.runs.processes.systemd import open_supervisor
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import Run, StateFolder
from launcher.runs.records.self_reports import read_report, read_training
from trainer.system.errors import BudgetStopError

JOINED = frozenset({"active", "idle"})
"""States in `status.json` of a worker that takes part."""
OVER = ("completed", "failed", "stopped")
"""States of a run that has ended."""
_HANGING_PAUSE = 30.0
"""Seconds for which a `status.json` that hung is not read again: each try leaves a thread there."""


@dataclass(frozen=True)
class RunView:
    """One view of a run."""

    run: Run
    state: str
    """`starting`, `running`, `waiting` (the student for a teacher), `recovering` (the leader is
    restarted), `stopping`, `scoring` (the student is done, its checkpoints are still evaluated),
    `completed` (all steps are done), `failed`, `stopped` (asked to, before that), or `unknown`:
    the leader's host does not answer."""
    reason: str | None
    processes: Mapping[str, ProcessState]
    training: Mapping[str, Any] | None
    """The leader's `status.json`; None until it has written one."""
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Reports of the other processes, by name: those that have written one."""
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hosts that did not answer, with the reason."""
    late: Sequence[str] = ()
    """Those of them that are still asked."""
    folders: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where the processes of the hosts that answered keep state and logs, by name."""
    end: str | None = None
    """Why the run was asked to end, by its leader's host; None when it was not."""

    @property
    def is_live(self) -> bool:
        """Whether anything of the run is kept running, as far as the hosts answer."""
        return any(
            not state.is_over and state.state != "unreachable" for state in self.processes.values()
        )

    @property
    def outcome(self) -> str:
        """The state for people: an end that is not `completed` has the last step or the reason."""
        training = self.training or {}
        if self.state == "stopped" and training.get("total_steps"):
            return f"stopped at {training.get('step', 0)}/{training['total_steps']}"
        return f"failed: {self.reason}" if self.state == "failed" and self.reason else self.state

    @property
    def joined_ranks(self) -> list[int]:
        """The ranks that take part, as the coordinator reports."""
        return sorted(w["rank"] for w in self.worker_reports if w.get("state") in JOINED)

    @property
    def worker_reports(self) -> list[dict[str, Any]]:
        """The coordinator's report on each worker: `rank`, `state`, `samples`, ..."""
        return list((self.training or {}).get("workers") or ())

    @cached_property
    def _members_by_rank(self) -> dict[int | None, dict[str, Any]]:
        """The reports on workers by rank; of two on one rank the first."""
        return {member.get("rank"): member for member in reversed(self.worker_reports)}

    def find_report(self, process: ProcessPlan) -> Mapping[str, Any]:
        """The report on a process besides its state: `state`, `tokens_per_second`, ..."""
        match process.role:
            case "worker":
                return self._members_by_rank.get(process.rank, {})
            case "student":
                return self.training or {}
            case _:
                return self.reports.get(process.name, {})

    @property
    def result_lines(self) -> list[str]:
        """The result of an ended run and the next steps, as the leader reports them."""
        return list((self.training or {}).get("summary") or ()) if self.state in OVER else []

    @property
    def remarks(self) -> list[str]:
        """Lines on workers without a share, failed notifications, and how to resume the run."""
        lines: list[str] = []
        if self.is_live:
            moved = "lost, its samples moved to the others"
            why = {"idle": "idle: would slow the step", "lost": moved}
            states = ((w.get("rank"), why.get(str(w.get("state")))) for w in self.worker_reports)
            lines = [f"worker {rank} {words}" for rank, words in states if words]
        if failure := (self.training or {}).get("notify_failure"):
            lines.append(f"notification failed: {failure}")
        for name, process in self.processes.items():
            if process.progress and not process.is_over:
                lines.append(f"{name}: {process.progress}")
            if process.notify_failure:
                lines.append(f"{name}: notification failed: {process.notify_failure}")
        if self.state in ("failed", "stopped") and not self.result_lines and self.run.is_launched:
            kind = "distill" if self.run.plan.leader.role == "student" else "cluster"
            stop = f"launch cluster down --run {self.run.run_id}; " if self.is_live else ""
            script = " --script FILE" if "--script" in self.run.plan.leader.argv else ""
            command = f"launch {kind} up --resume {self.run.run_id}{script}"
            lines.append(f"to resume it: {stop}{command}")
        return lines

    def takes_part(self, process: ProcessPlan) -> bool:
        """Return whether a process has joined the run."""
        if process.role == "worker":
            return self.find_report(process).get("state") in JOINED
        if process.report_file:
            return process.name in self.reports
        return self.processes[process.name].state in ("running", "exited")

    @property
    def missing_processes(self) -> list[ProcessPlan]:
        """The followers that do not take part."""
        return [process for process in self.run.plan.followers if not self.takes_part(process)]


_States = dict[str, tuple[ProcessState, str]]
"""States and folders of a host's processes, by name."""


class RunMonitor:
    """A run's hosts: a supervisor for each, and what its processes write."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._hanging_until: dict[str, float] = {}
        self._plans: dict[str, LaunchPlan] = {}

    def find_supervisor(self, process: ProcessPlan) -> SessionSupervisor:
        """Return the supervisor of the process's host.

        Raises:
            UnreachableError: the host cannot be driven.
        """
        host = self.run.find_host(process.host)
        return self._open_supervisor(host, ssh.connect_host(host))

    def _open_supervisor(self, host: Host, connection: Connection) -> SessionSupervisor:
        home = self.run.run_folder(host, connection)
        return open_supervisor(connection, self.run.run_id, home=home)

    def read_state(self, process: ProcessPlan) -> ProcessState:
        """Return what is known about a process.

        Raises:
            UnreachableError: its host does not answer.
        """
        return self.find_supervisor(process).read_state(process)

    def last_lines(
        self, process: ProcessPlan, count: int = 10, attempt: int | None = None
    ) -> list[str]:
        """Return the end of an attempt's log; without one, of the newest that is not empty."""

        def read(host: Host, connection: Connection) -> list[str]:
            return last_lines(self._open_supervisor(host, connection), process, count, attempt)

        answers = fleet.ask_hosts([self.run.find_host(process.host)], read)
        for name, error in answers.errors.items():
            return [f"(no log: {format_error(name, error)})"]
        return answers.found[process.host]

    def observe(
        self, deadline: float = LOOK, on_late: Callable[[RunView], None] | None = None
    ) -> RunView:
        """Look once at all hosts; returns within the deadline, whether or not they answer.

        Args:
            on_late: takes the view that lacks late hosts, which are then asked until their logins'
                deadlines.
        """
        plan = self.run.plan
        began = time.monotonic()

        ends: list[str | None] = []

        def read_host_states(host: Host, connection: Connection) -> _States:
            supervisor = self._open_supervisor(host, connection)
            here = [process for process in plan.processes if process.host == host.name]
            found = {p.name: (supervisor.read_state(p), supervisor.process_folder(p)) for p in here}
            if host.name == plan.leader.host:
                ends.append(self.run.read_stop_reason(host, connection))
            return found

        def report_late(answers: Answers[_States]) -> None:
            if on_late is not None:
                on_late(self._make_view(answers, ends, LOOK))

        answers = fleet.ask_hosts(
            self.run.hosts,
            read_host_states,
            deadline,
            on_late=None if on_late is None else report_late,
        )
        left = LOOK if on_late is not None else deadline - (time.monotonic() - began)
        return self._make_view(answers, ends, max(0.5, left))

    def _make_view(
        self, answers: Answers[_States], ends: Sequence[str | None], deadline: float
    ) -> RunView:
        """Return the view of what hosts answered, with the reports read until a deadline."""
        plan = self.run.plan
        states: dict[str, ProcessState] = {}
        folders: dict[str, str] = {}
        for process in plan.processes:
            error = answers.errors.get(process.host)
            if error is not None:
                states[process.name] = ProcessState(
                    state="unreachable", message=format_error(process.host, error)
                )
            else:
                found = answers.found[process.host][process.name]
                states[process.name], folders[process.name] = found
        words = self._read_reports(states, deadline)
        head, training = states[plan.leader.name], words.pop(plan.leader.name, None)
        state = derive_state(head, training)
        if plan.leader.role == "student":
            scored = all(states[p.name].is_over for p in plan.followers if p.role == "evaluator")
            if state == "starting" and training is not None:
                state = "waiting"
            elif state == "completed" and not scored:
                state = "scoring"
        reason = (training or {}).get("reason") or head.message
        if head.state == "lost" and (training or {}).get("state") not in OVER:
            reason = head.message  # the last report's is older
        end = ends[0] if ends else None
        if state == "stopped" and end:  # by a start that failed
            state, reason = "failed", end
        unreachable = {name: format_error(name, error) for name, error in answers.errors.items()}
        return RunView(
            *(self.run, state, reason, states, training, words, unreachable),
            late=answers.late,
            folders=folders,
            end=end,
        )

    def _read_reports(
        self, states: Mapping[str, ProcessState], deadline: float
    ) -> dict[str, Mapping[str, Any]]:
        """Return the reports of processes; nothing while the file of a report hangs."""
        plan, now = self.run.plan, time.monotonic()
        questions = {
            process.name: (
                self.run.find_host(process.host),
                partial(self._read_process_reports, process, states[process.name]),
            )
            for process in plan.processes
            if (process is plan.leader or process.report_file)
            and states[process.name].state != "unreachable"
            and now >= self._hanging_until.get(process.name, 0.0)
        }
        answers = ask_each(questions, deadline, ssh.connect_host)
        for name, error in answers.errors.items():
            if isinstance(error, UnreachableError):
                self._hanging_until[name] = now + _HANGING_PAUSE
        return {name: words for name, words in answers.found.items() if words is not None}

    def _read_process_reports(
        self, process: ProcessPlan, state: ProcessState, connection: Connection
    ) -> Mapping[str, Any] | None:
        """Return what the present attempt of a process wrote, else the last of an ended one."""
        host = self.run.find_host(process.host)
        plan = self._plans.get(host.name) or self.run.read_plan_of_host(host, connection)
        here = None if plan is None else plan.find_process(process.name)
        if plan is None or here is None:
            return None
        self._plans[host.name] = plan
        if process is self.run.plan.leader:
            return read_training(connection, plan, state.started)
        words = read_report(connection, here.report_file)
        pid = state.child.pid if state.child is not None else None
        fresh = state.is_over or (words is not None and words.get("pid") == pid)
        return words if fresh and state.state != "absent" else None


def shards_written(member: Mapping[str, Any]) -> str:
    """Return how many of its shards a teacher has written, as `3/12`; empty for other processes."""
    return f"{member.get('shards_done', 0)}/{member['shards']}" if member.get("shards") else ""


def derive_state(leader: ProcessState, training: Mapping[str, Any] | None) -> str:
    """Return the run's state from its leader's process and last report."""
    reported = str((training or {}).get("state", "waiting"))
    match leader.state:
        case "exited" | "stopped":
            return reported if reported in OVER else "stopped"
        case "failed" if leader.exit_code == BudgetStopError.exit_code and reported == "stopped":
            return "stopped"
        case "failed" | "lost":
            return "failed"
        case "absent":
            return "stopped"
        case "unreachable":
            return "unknown"
        case "backoff":
            return "recovering"
        case "stopping":
            return "stopping"
        case _:
            return {"waiting": "starting", "running": "running"}.get(reported, "stopping")


def live_runs(registry: Registry, surely: bool = False) -> list[RunView]:
    """Return every run of which something is kept running, the oldest first.

    Each host lists its own unfinished runs, so that a long history costs no time. With `surely`
    every host has to answer; else only the hosts that answer at once count.

    Raises:
        UnreachableError: with `surely`, for a host that does not answer.
    """

    def list_unfinished(place: StateFolder) -> list[str]:
        return place.connection.ask(list_unfinished_runs, str(place.folder))

    deadline = REACH if surely else LOOK
    answers = registry.ask_hosts(list_unfinished, deadline)
    named = answers.require() if surely else answers.found
    among = {run_id for ids in named.values() for run_id in ids}
    views = [RunMonitor(run).observe(deadline) for run in registry.read_runs(among)]
    return [view for view in views if view.is_live]


def find_run(registry: Registry, run_id: str | None) -> Run | None:
    """Return the named run; without a name the newest live one, else the newest at all."""
    if run_id is not None:
        return registry.get_run(run_id)
    live = live_runs(registry)
    if live:
        return live[-1].run
    runs = registry.read_runs()
    return runs[-1] if runs else None
