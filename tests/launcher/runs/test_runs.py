"""The registry of a cluster: on its coordinator's host, else what the others know."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, PreflightError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.local import LocalConnection
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.down import tear_down
from launcher.runs.records.registry import Registry, authority_folder
from launcher.runs.records.run import StateFolder
from launcher.runs.status import RunMonitor, RunView
from launcher.runs.up import deliver_run
from tests.launcher.played_hosts import Disk
from trainer.config.run import load_config

CPU = Device("cpu", "cpu")


@pytest.fixture
def down(tmp_path: Path, silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Give every host a disk; the names of those that do not answer."""
    names: set[str] = set()

    def connect(host: Host) -> Disk:
        if host.name in names:
            raise UnreachableError(f"host {host.name}: connection refused")
        return Disk(tmp_path / host.name)

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "laptop"))
    return names


@pytest.fixture
def hosts() -> tuple[Host, ...]:
    intel = Host(name="intel", coordinator=True, bind_address="10.0.0.2", devices=(CPU,))
    return (Host(name="lambda", devices=(CPU,)), intel)


def make_plan(tmp_path: Path, hosts: tuple[Host, ...], run_id: str) -> LaunchPlan:
    there = [replace(host, state_folder=str(tmp_path / host.name)) for host in hosts]
    setting = PlanContext(run_id=run_id, trainer_command=("t",), state_folder="/s", routes={})
    return place_run(there, load_config("quickstart", {"output": str(tmp_path)}), None, setting)


def keep(registry: Registry, tmp_path: Path, hosts: tuple[Host, ...], run_id: str) -> None:
    run, text = registry.record_run(make_plan(tmp_path, hosts, run_id))
    for host in run.hosts:
        folder = Path(run.run_folder(host, ssh.connect_host(host)))
        folder.mkdir(parents=True)
        (folder / "plan.json").write_bytes(text)
        (folder / "run.yaml").write_text("name: demo\n")


def test_a_run_is_read_from_the_coordinators_host(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...]
) -> None:
    registry = Registry.for_hosts(hosts)
    assert registry.folder == tmp_path / "intel"
    assert registry.read_runs() == []
    keep(registry, tmp_path, hosts, "demo-1")
    keep(registry, tmp_path, hosts, "demo-2")
    runs = Registry.for_hosts(hosts).read_runs()
    assert [run.run_id for run in runs] == ["demo-1", "demo-2"]
    assert runs[0].leader_host.name == "intel"
    there = runs[0].run_folder(hosts[0], ssh.connect_host(hosts[0]))
    assert there == str(tmp_path / "lambda" / "runs" / "demo-1")
    assert registry.read_config("demo-1") == b"name: demo\n"
    assert [run.run_id for run in registry.read_runs({"demo-2", "other"})] == ["demo-2"]


def test_a_run_without_the_coordinators_host_is_known_there_too(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...]
) -> None:
    """A distillation may pass it over; `status` and the next `up` ask there."""
    registry = Registry.for_hosts(hosts)
    plan = make_plan(tmp_path, (replace(hosts[0], coordinator=True),), "demo-1")
    deliver_run(*registry.record_run(plan), b"name: demo\n")
    assert [run.run_id for run in Registry.for_hosts(hosts).read_runs()] == ["demo-1"]
    assert registry.read_config("demo-1") == b"name: demo\n"
    kept = tmp_path / "{}" / "runs" / "demo-1" / "processes"
    assert [Path(str(kept).format(host)).exists() for host in ("lambda", "intel")] == [True, False]


def test_connections_follow_the_inventory_alone(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...]
) -> None:
    keep(Registry.for_hosts(hosts), tmp_path, hosts, "demo-1")
    moved = tuple(replace(host, address="10.9.9.9") for host in hosts if host.name == "intel")
    run = Registry.for_hosts(moved).get_run("demo-1")
    assert run.find_host("intel").address == "10.9.9.9"
    assert run.find_host("lambda") == Host(name="lambda", connection="none")


def test_without_the_coordinators_host_the_others_are_read_and_nothing_is_started(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...], silent_hosts: dict[Any, Any]
) -> None:
    keep(Registry.for_hosts(hosts), tmp_path, hosts, "demo-1")
    down.add("intel")
    registry = Registry.for_hosts(hosts)
    assert str(registry.absence) == "host intel: connection refused"
    assert [run.run_id for run in registry.read_runs()] == ["demo-1"]
    with pytest.raises(UnreachableError, match="host intel"), registry.lock("run demo-2"):
        pass
    down.add("lambda")
    silent_hosts.clear()
    with pytest.raises(UnreachableError) as caught:
        Registry.for_hosts(hosts)
    assert "host intel: connection refused" in (str(caught.value), *caught.value.details)


def test_a_view_shows_what_is_known_and_then_the_late_host(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(Registry.for_hosts(hosts), tmp_path, hosts, "demo-1")
    monitor = RunMonitor(Registry.for_hosts(hosts).get_run("demo-1"))
    opened = threading.Event()

    def connect(host: Host) -> Disk:
        if host.name == "lambda":
            assert opened.wait(60)
        return Disk(tmp_path / host.name)

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    known: list[RunView] = []

    def show(view: RunView) -> None:
        known.append(view)
        opened.set()

    view = monitor.observe(0.3, show)
    (before,) = known
    assert list(before.late) == ["lambda"]
    assert before.unreachable == {"lambda": "querying lambda ..."}
    places = {process.name: process.host for process in before.run.plan.processes}
    unknown = {name for name, state in before.processes.items() if state.state == "unreachable"}
    assert unknown == {name for name, place in places.items() if place == "lambda"} != set()
    assert list(view.late) == []
    assert view.unreachable == {}
    assert "unreachable" not in {state.state for state in view.processes.values()}


def test_who_comes_second_is_told_who_is_first(down: set[str], hosts: tuple[Host, ...]) -> None:
    first, second = Registry.for_hosts(hosts), Registry.for_hosts(hosts)
    with (
        first.lock("run demo-1"),
        pytest.raises(
            PreflightError, match=r"run demo-1 by \S+@\S+ since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        ),
        second.lock("run demo-2"),
    ):
        pass
    with second.lock("run demo-2"):
        pass


def test_the_cas_folder_is_the_laptops_own(
    tmp_path: Path, down: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert authority_folder() == tmp_path / "laptop" / "ca"
    assert authority_folder().stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set MOTLEY_STATE_DIR"):
        authority_folder()


def test_damaged_runs_are_left_out_and_named_when_asked_for(tmp_path: Path) -> None:
    registry = Registry(StateFolder(LocalConnection(), tmp_path))
    (tmp_path / "runs" / "torn").mkdir(parents=True)
    (tmp_path / "runs" / "torn" / "plan.json").write_text("{")
    (tmp_path / "runs" / "empty").mkdir()
    assert registry.read_runs() == []
    with pytest.raises(ConfigError, match=r"torn/plan.json: damaged"):
        registry.get_run("torn")
    for run_id in ("empty", "absent", "../x"):
        with pytest.raises(ConfigError, match=f"no run {run_id} \\(latest: none yet"):
            registry.get_run(run_id)


def test_the_end_of_a_run_is_written_on_every_host_that_has_it(
    tmp_path: Path, down: set[str], hosts: tuple[Host, ...]
) -> None:
    registry = Registry.for_hosts(hosts)
    keep(registry, tmp_path, hosts, "demo-1")
    run = registry.get_run("demo-1")
    assert RunMonitor(run).observe().end is None
    down.add("lambda")
    assert list(tear_down(run, grace=0.0, why="a worker is missing").left) == ["lambda"]
    tear_down(run, grace=0.0, why="the first reason is kept")
    assert RunMonitor(run).observe().end == "a worker is missing"
    intel = run.run_folder(run.leader_host, ssh.connect_host(run.leader_host))
    assert json.loads(Path(intel, "plan.json").read_text())["run_id"] == "demo-1"
