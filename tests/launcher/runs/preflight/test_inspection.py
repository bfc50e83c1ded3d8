"""Preflight over three hosts with a network and an agent each, and what breaks between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.checks.finding import Result
from launcher.errors import (
    InvalidAnswerError,
    LauncherError,
    PreflightError,
    UnreachableError,
    raise_all,
)
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey, survey_connections
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from launcher.runs.cluster import check_hosts
from launcher.runs.preflight.inspection import CHECKS, check_clock, inspect_hosts
from launcher.runs.up import make_plan
from tests.launcher.hollow_model import make_model
from tests.launcher.separate_hosts import SeparateHosts, missing
from tests.ports import free_port
from trainer.config.run import RunConfig, load_config

pytestmark = pytest.mark.cluster

ABSENCE = missing()
needs_namespaces = pytest.mark.skipif(ABSENCE is not None, reason=ABSENCE or "")

CPU = (Device("cpu", "cpu"),)
TRAINER = (str(Path(sys.executable).with_name("trainer")),)
HEAD = Host(name="intel", coordinator=True, devices=CPU, trainer_command=TRAINER)
WORKERS = tuple(
    Host(name=name, devices=CPU, trainer_command=TRAINER) for name in ("lambda", "attic")
)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SeparateHosts]:
    with SeparateHosts(tmp_path, "intel", "lambda", "attic") as hosts:
        yield hosts


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    data = tmp_path / "train.jsonl"
    data.write_text('{"input": "ls", "label": 0}\n')
    return load_config(
        "quickstart",
        {
            "model.path": str(make_model(tmp_path / "model", hidden=640, vocabulary=300)),
            "data.train": str(data),
            "data.validation": str(data),
            "output": str(tmp_path / "output"),
        },
    )


NAMES = list(dict.fromkeys(check.name for check in CHECKS))


def plan_of(found: Survey, config: RunConfig | None = None) -> LaunchPlan:
    raise_all([*found.failures.values()])
    return make_plan(found, config or load_config("quickstart"), None)


def of(checks: list[Result], host: str, name: str) -> Result:
    return next(check for check in checks if (check.host, check.name) == (host, name))


def failures(checks: list[Result]) -> list[str]:
    return [check.line for check in checks if check.status == "fail"]


@needs_namespaces
def test_three_ready_hosts(three: SeparateHosts, config: RunConfig) -> None:
    found = three.survey(HEAD, *WORKERS)
    plan = plan_of(found, config)
    assert plan.bind_address == three.address("intel")
    assert len(set(found.identities.values())) == 3
    assert [worker.address for worker in plan.workers] == [f"{plan.bind_address}:9000"] * 3
    assert three.address("attic") in plan.workers[2].certificate_names
    checks = inspect_hosts(found, plan, config)
    assert failures(checks) == []
    for name in ("lambda", "attic"):
        assert "bit/s to the coordinator" in of(checks, name, "link").detail
        assert of(checks, name, "mtu").detail == "1500 on eth0"
        assert of(checks, name, "model").detail.endswith("the same as on intel")
        assert of(checks, name, "data").detail.endswith("the same as on intel")
    assert {check.name for check in checks} <= set(NAMES)
    assert [c.name for c in checks if c.host == "intel"] == sorted(
        {c.name for c in checks if c.host == "intel"}, key=NAMES.index
    )
    memory = [check for check in checks if check.name == "memory"]
    assert [check.host for check in memory] == ["intel", "lambda", "attic"]


@needs_namespaces
@pytest.mark.parametrize("other", ["intel", "lambda"])
def test_a_host_of_another_version_is_not_asked_about_a_job(
    three: SeparateHosts, config: RunConfig, other: str
) -> None:
    """It may not know the job's settings; what is wrong there is its version."""
    found = three.survey(HEAD, *WORKERS)
    aged = replace(found.machines[other], code="0" * 64)
    found = replace(found, machines={**found.machines, other: aged})
    checks = inspect_hosts(found, plan_of(found, config), config)
    (failed,) = [check for check in checks if check.status == "fail"]
    assert failed.name == "version"
    assert failed.remedy.startswith("launch cluster push, or: ansible-playbook ")
    job = {"model", "data", "validation", "output", "memory"}
    assert job.isdisjoint(check.name for check in checks if check.host == other)
    assert job - {"output"} <= {check.name for check in checks if check.host == "attic"}


@needs_namespaces
def test_what_the_network_does_wrong_is_named_with_its_direction(three: SeparateHosts) -> None:
    found = three.survey(HEAD, *WORKERS)
    plan = plan_of(found)
    three.run("intel", f"ip route add blackhole {three.address('lambda')}/32")
    three.run("attic", "ip link set eth0 mtu 1400")
    found = three.survey(replace(HEAD, bind_address=plan.bind_address), *WORKERS)
    checks = inspect_hosts(found, plan_of(found), None)
    lost = of(checks, "lambda", "link")
    assert lost.status == "fail"
    assert f"no connection to {plan.bind_address}:9000" in lost.detail
    assert "open TCP port 9000 on intel for lambda" in lost.remedy
    mtu = of(checks, "attic", "mtu")
    assert (mtu.status, mtu.detail) == ("warn", "1400 on eth0, 1500 on eth0 of intel")
    assert of(checks, "attic", "link").status != "fail"
    assert of(checks, "intel", "port").status == "ok"


@needs_namespaces
def test_a_slow_link_is_said_with_its_figure(tmp_path: Path) -> None:
    with SeparateHosts(tmp_path, "intel", "lambda", rate=20 * 10**6) as two:
        found = two.survey(HEAD, WORKERS[0])
        link = of(inspect_hosts(found, plan_of(found), None), "lambda", "link")
    assert link.status == "warn"
    assert link.detail.endswith("slow")


@needs_namespaces
def test_a_taken_port_is_the_coordinators_failure_alone(three: SeparateHosts) -> None:
    found = three.survey(HEAD, *WORKERS)
    plan = plan_of(found)
    code = (
        f"import signal, socket; s = socket.create_server(({plan.bind_address!r}, 9000)); "
        "print('here', flush=True); signal.pause()"
    )
    with three.running("intel", [sys.executable, "-c", code]) as line:
        assert line == "here\n"
        checks = inspect_hosts(found, plan, None)
    assert "is in use by python" in of(checks, "intel", "port").detail
    assert of(checks, "lambda", "link").detail == (
        f"not tested: intel could not listen on {plan.bind_address}:9000"
    )


@needs_namespaces
def test_a_host_that_dies_costs_its_own_line(three: SeparateHosts, config: RunConfig) -> None:
    found = three.survey(HEAD, *WORKERS)
    plan = plan_of(found, config)
    three.lose("lambda")
    checks = inspect_hosts(found, plan, config)
    assert {line.partition(":")[0] for line in failures(checks)} == {"lambda"}
    assert of(checks, "attic", "link").status != "fail"
    again = three.survey(HEAD, *WORKERS)
    assert list(again.failures) == ["lambda"]
    checks = inspect_hosts(again, None, None)
    assert of(checks, "lambda", "reachable").status == "fail"
    assert of(checks, "attic", "reachable").status == "ok"


def test_two_names_of_this_machine_are_one_machine(config: RunConfig) -> None:
    local = replace(HEAD, connection="local")
    other = replace(local, name="again", coordinator=False)
    found = survey_connections(
        [local, other], {"intel": LocalConnection(), "again": LocalConnection()}
    )
    assert len(set(found.identities.values())) == 1
    assert found.sources == {}
    port = free_port()
    hosts = tuple(replace(host, port=port) for host in found.hosts)
    plan = plan_of(replace(found, hosts=hosts), config)
    assert plan.bind_address == "127.0.0.1"
    checks = inspect_hosts(replace(found, hosts=hosts), plan, config)
    assert failures(checks) == []
    assert {check.name for check in checks}.isdisjoint({"link", "version", "reachable"})
    assert [check.host for check in checks if check.name == "memory"] == ["intel"]


def test_a_plan_that_cannot_be_made_is_a_finding() -> None:
    hosts = [replace(HEAD, connection="local", coordinator=False, name=name) for name in "ab"]
    checks = check_hosts(hosts, load_config("quickstart"), None, whole=False)
    assert of(checks, "cluster", "plan").detail.startswith("set motley_coordinator: true on one")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (UnreachableError("host intel: ITS HOST KEY HAS CHANGED: x"), "host key"),
        (UnreachableError("host intel: connection refused"), "reachable"),
        (PreflightError("host intel: no question 'machine'; launch cluster push"), "version"),
    ],
)
def test_what_keeps_a_host_from_answering_is_the_check_that_it_failed(
    error: LauncherError, name: str
) -> None:
    found = survey_connections([HEAD], {}, {"intel": error})
    assert [(check.name, check.status) for check in inspect_hosts(found, None, None)] == [
        (name, "fail")
    ]


class Clock(LocalConnection):
    """A host whose clock is off, and which takes a while to say so."""

    def __init__(self, offset: float, trips: list[float]) -> None:
        super().__init__()
        self.now = 1000.0
        self._offset = offset
        self._trips = trips

    def call(self, *_: object, **__: object) -> float:
        trip = self._trips.pop(0)
        self.now += trip / 2
        told = self.now + self._offset
        self.now += trip / 2
        return told


@pytest.mark.parametrize(
    ("offset", "status"),
    [(0.0, "ok"), (1.9, "ok"), (-1.9, "ok"), (2.5, "warn"), (-30.0, "warn"), (61.0, "fail")],
)
def test_clocks_are_compared_without_the_time_that_asking_takes(offset: float, status: str) -> None:
    clock = Clock(offset, [8.0, 0.2, 3.0])
    finding = check_clock(clock, lambda: clock.now)
    assert finding.status == status
    assert finding.detail.startswith(f"{offset:+.2f} s (within 0.10 s)")


def test_a_slow_answer_is_no_proof_of_a_wrong_clock() -> None:
    clock = Clock(5.0, [9.0, 9.0, 9.0])
    assert check_clock(clock, lambda: clock.now).status == "ok"


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), "now", None, [1]])
def test_an_answer_that_is_no_time_is_no_clock(answer: Any) -> None:
    class Liar(LocalConnection):
        def call(
            self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 1.0
        ) -> Any:
            return answer

    with pytest.raises(InvalidAnswerError, match=r"host localhost: clock: .*launch cluster push"):
        check_clock(Liar())
