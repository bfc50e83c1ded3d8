"""The declaration of a check, and the data about the examined cluster that it can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, ParamSpec

from launcher.agent.checks.finding import Finding, Result
from launcher.agent.operation import Operation
from launcher.hosts.base import Connection
from launcher.hosts.survey import Survey
from launcher.inventory.facts import machine
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.preflight.content import Content
from launcher.runs.preflight.link import LinkTrial
from launcher.runs.preflight.probe import Probe
from launcher.runs.preflight.versions import compare
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig

P = ParamSpec("P")
Kind = Literal["host", "plan", "training", "distillation"]
Asked = Iterable[tuple[Callable[[], Finding], float]]
"""What finds out, and the seconds that it may take."""


class Examination:
    """The examined hosts, all of which answered, and the run planned on them."""

    def __init__(
        self,
        found: Survey,
        names: Sequence[str],
        plan: LaunchPlan | None = None,
        job: RunConfig | DistillJob | None = None,
    ) -> None:
        self.found = found
        self.names = names
        self.contents: dict[tuple[str, str, str], Content] = {}
        """What hosts have of inputs, by host, question and path."""
        self._plan = plan
        self._job = job

    def concerns(self, kind: Kind) -> bool:
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
    def head(self) -> str:
        """The leader's host; empty without a plan."""
        return "" if self._plan is None else self._plan.leader.host

    def host(self, name: str) -> Host:
        """Return a host as it was surveyed."""
        return next(host for host in self.found.hosts if host.name == name)

    def connection(self, name: str) -> Connection:
        """Return the connection to a host."""
        return self.found.connections[name]

    def ask(
        self, name: str, question: Operation[P, Finding], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Callable[[], Finding], float]:
        """Return what asks a host, which answers with a finding, and the seconds for it."""
        # The probe's own deadline comes first, with a remedy; this one ends the request.
        later = question.within(question.deadline + 5)
        connection = self.connection(name)
        return lambda: connection.ask(later, *args, **kwargs), question.deadline

    def processes(self, name: str) -> list[ProcessPlan]:
        """Return the planned processes of a host."""
        return [process for process in self.plan.processes if process.host == name]

    def state_folder(self, name: str) -> str:
        """Return where a host of the plan keeps its runs."""
        return self.processes(name)[0].state_folder

    def same_machine(self, name: str, other: str) -> bool:
        """Whether two names are one machine."""
        identities = self.found.identities
        return identities.get(name) == identities.get(other)

    def asked(self, kind: Kind) -> Sequence[str]:
        """Return the hosts that are asked: a job's settings may be unknown to another version."""
        if kind in ("host", "plan"):
            return self.names
        other = {c.host for c in self.skew if (c.name, c.status) == ("version", "fail")}
        return [name for name in self.names if name not in other]

    @cached_property
    def link(self) -> LinkTrial | None:
        """The trial of all links to the coordinator; None where there is none to try."""
        far = [name for name in self.names if not self.same_machine(name, self.head)]
        if self.plan.port is None or self.head not in self.names or not far:
            return None
        return LinkTrial(self.plan, self.found.connections, far)

    @cached_property
    def skew(self) -> list[Result]:
        """How versions differ; nothing where this machine is the only one."""
        several = len(set(self.found.identities.values())) > 1
        if not several and all(host.is_local for host in self.found.hosts):
            return []
        machines = {name: self.found.machines[name] for name in self.names}
        return compare(machines, machine.describe(), self.head)


@dataclass(frozen=True)
class Check:
    """One check: what is checked of a host, and how; the finding is the verdict and the remedy."""

    name: str
    kind: Kind
    probe: Callable[[Examination, str], Asked]
    """Of a host: none where the check does not apply to it, else mostly one."""

    def probes(self, cluster: Examination, name: str) -> Iterator[Probe]:
        """Yield the probes of one host."""
        for find, deadline in self.probe(cluster, name):
            yield Probe(self.name, name, find, deadline)
