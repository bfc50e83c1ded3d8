"""The declaration of a check, the data about a cluster that it can use, and how hosts are asked.

`inspection.py` declares all checks; `launch doctor` and every `up` run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, ParamSpec

from launcher.agent.checks.finding import Finding, Result
from launcher.agent.operation import CHECK_DEADLINE, Operation
from launcher.errors import LauncherError
from launcher.hosts.base import Connection
from launcher.hosts.fleet import ask_each
from launcher.hosts.survey import Survey
from launcher.inventory.facts import machine
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.preflight.content import HostDigests
from launcher.runs.preflight.link import LinkTrial
from launcher.runs.preflight.versions import compare_versions
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.config.script import Script

P = ParamSpec("P")
Kind = Literal["host", "plan", "training", "distillation"]
Question = tuple[Callable[[Connection], Finding], float]
"""A function that asks a host over its connection, and its deadline in seconds."""


def host_question(operation: Operation[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Question:
    """Return the question whether a host's own check is passed."""
    # The check's own deadline comes first, with a remedy; this one ends the request.
    later = operation.with_deadline(operation.deadline + 5)
    return lambda there: there.ask(later, *args, **kwargs), operation.deadline


def known_question(finding: Finding) -> Question:
    """Return the question whose answer is known already."""
    return lambda _there: finding, CHECK_DEADLINE


class CheckContext:
    """The hosts that are checked, all of which answered, and the run planned on them."""

    def __init__(
        self,
        found: Survey,
        names: Sequence[str],
        plan: LaunchPlan | None = None,
        job: RunConfig | DistillJob | None = None,
        script: Script | None = None,
    ) -> None:
        self.found = found
        self.script = script
        self.names = names
        self.contents: dict[tuple[str, str, str], HostDigests] = {}
        """Digests of inputs on hosts, by host, question and path."""
        self._plan = plan
        self._job = job

    def has_kind(self, kind: Kind) -> bool:
        """Whether there is something to check of a kind."""
        if kind == "host" or self._plan is None:
            return kind == "host"
        wanted = {"training": RunConfig, "distillation": DistillJob}.get(kind, object)
        return isinstance(self._job, wanted)

    @property
    def plan(self) -> LaunchPlan:
        """The plan, for checks of one."""
        assert self._plan is not None
        return self._plan

    @property
    def config(self) -> RunConfig:
        """The config, for checks of a training run."""
        assert isinstance(self._job, RunConfig)
        return self._job

    @property
    def distillation(self) -> DistillJob:
        """The job, for checks of a distillation."""
        assert isinstance(self._job, DistillJob)
        return self._job

    @property
    def leader_host(self) -> str:
        """The leader's host; empty without a plan."""
        return "" if self._plan is None else self._plan.leader.host

    def find_host(self, name: str) -> Host:
        """Return a host as it was surveyed."""
        return next(host for host in self.found.hosts if host.name == name)

    def find_connection(self, name: str) -> Connection:
        """Return the connection to a host."""
        return self.found.connections[name]

    def list_processes(self, name: str) -> list[ProcessPlan]:
        """Return the planned processes of a host."""
        return [process for process in self.plan.processes if process.host == name]

    def state_folder(self, name: str) -> str:
        """Return where a host of the plan keeps its runs."""
        return self.list_processes(name)[0].state_folder

    def same_machine(self, name: str, other: str) -> bool:
        """Whether two names are one machine."""
        identities = self.found.identities
        return identities.get(name) == identities.get(other)

    def hosts_to_ask(self, kind: Kind) -> Sequence[str]:
        """Return the hosts that are asked: a job's settings may be unknown to another version."""
        if kind in ("host", "plan"):
            return self.names
        other = {c.host for c in self.version_results if (c.name, c.status) == ("version", "fail")}
        return [name for name in self.names if name not in other]

    @cached_property
    def link_trial(self) -> LinkTrial | None:
        """The trial of all links to the coordinator; None where there is none to try."""
        far = [name for name in self.names if not self.same_machine(name, self.leader_host)]
        if self.plan.port is None or self.leader_host not in self.names or not far:
            return None
        return LinkTrial(self.plan, far)

    @cached_property
    def version_results(self) -> list[Result]:
        """How versions differ; nothing where this machine is the only one."""
        several = len(set(self.found.identities.values())) > 1
        if not several and all(host.is_local for host in self.found.hosts):
            return []
        machines = {name: self.found.machines[name] for name in self.names}
        return compare_versions(machines, machine.describe_machine(), self.leader_host)


@dataclass(frozen=True)
class Check:
    """One check, as docs/checks.md shows it, and its questions to each host that it concerns."""

    name: str
    subject: str
    """The hosts that it is of."""
    fault: str
    """When it fails, or warns."""
    remedy: str
    """The remedy of findings without their own; empty if each has its own."""
    probes: Mapping[Kind, Callable[[CheckContext, str], Iterable[Question]]]
    """By kind, the questions to a host: none where the check does not apply to it."""

    def of_hosts(self, context: CheckContext, *kinds: Kind) -> list[HostCheck]:
        """Return what is checked of each host."""
        return [
            HostCheck(self, name, find, deadline)
            for kind in kinds or self.probes
            if kind in self.probes and context.has_kind(kind)
            for name in context.hosts_to_ask(kind)
            for find, deadline in self.probes[kind](context, name)
        ]


@dataclass(frozen=True)
class HostCheck:
    """A check of one host."""

    check: Check
    host: str
    find: Callable[[Connection], Finding]
    deadline: float = CHECK_DEADLINE
    """Seconds."""

    def run(self, there: Connection) -> Finding:
        """Return the finding; an error is one, too."""
        try:
            finding = self.find(there)
        except (LauncherError, OSError) as error:
            return Finding("fail", str(error))
        except Exception as error:  # a check must not end the others; its defect is its finding
            return Finding("fail", f"the check failed with an internal error: {error!r}")
        if finding.status == "ok" or finding.remedy:
            return finding
        return replace(finding, remedy=self.check.remedy.replace("`", ""))


def run_checks(checks: Sequence[HostCheck], connections: Mapping[str, Connection]) -> list[Result]:
    """Run every check at once and return the results in the given order.

    One that misses its deadline has failed, so a hanging file system costs one line.
    """
    keyed = {str(number): each for number, each in enumerate(checks)}
    answers = ask_each(
        {key: (Host(name=each.host), each.run) for key, each in keyed.items()},
        {key: each.deadline for key, each in keyed.items()},
        lambda host: connections[host.name],
        most=max(1, len(keyed)),  # some wait for one another
    )
    return [
        Result(each.check.name, each.host, found.status, found.detail, found.remedy)
        for key, each in keyed.items()
        for found in (answers.found.get(key) or _deadline_finding(each),)
    ]


def _deadline_finding(check: HostCheck) -> Finding:
    return Finding(
        "fail", f"no answer within {check.deadline:.0f} s", "a disk or network mount may be hanging"
    )
