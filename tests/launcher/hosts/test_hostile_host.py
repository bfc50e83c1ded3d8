"""A compromised host writes what it likes: the launcher takes names from it, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import STARTED
from launcher.hosts.local import LocalConnection
from launcher.hosts.ssh_config import resolve_route
from launcher.hosts.ssh_pipe import SshPipe
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from launcher.runs.down import tear_down
from launcher.runs.records.plan_file import read_record
from launcher.runs.records.registry import Registry
from launcher.runs.status import RunMonitor, find_run
from launcher.views.render import format_progress
from tests.launcher.sshd import Server
from trainer.config.run import load_config

RUN_ID = "demo-20261120-110300-7f3a"
Tree = dict[str, Any]


class Disk(LocalConnection):
    """A host with a state folder of its own; every path that is used there is noted."""

    def __init__(self, name: str, folder: Path, used: list[str]) -> None:
        super().__init__()
        self.name = name
        self.state_folder = str(folder)
        self._used = used

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        self._used.append(path)
        return super().read(path, offset, limit)

    def write(self, path: str, data: bytes) -> None:
        self._used.append(path)
        super().write(path, data)

    def names(self, folder: str) -> list[str]:
        self._used.append(folder)
        return super().list_folder(folder)

    def exists(self, path: str) -> bool:
        self._used.append(path)
        return super().exists(path)

    def remove(self, path: str) -> None:
        self._used.append(path)
        super().remove_file(path)


class Lab:
    """`evil` keeps the cluster's runs and has been taken over; `good` has not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: dict[str, list[str]] = {"evil": [], "good": [], "localhost": []}
        self.inventory = (
            Host(name="evil", coordinator=True, bind_address="10.0.0.2", devices=(_CPU,)),
            Host(name="good", devices=(_CPU,)),
            Host(name="localhost", connection="local", devices=()),
        )
        setting = PlanContext(run_id=RUN_ID, trainer_command=("t",), state_folder="/s", routes={})
        self.output = folder / "evil" / "output"
        plan = place_run(
            self.inventory[:2], load_config("quickstart", {"output": str(self.output)}), 2, setting
        )
        self.tree: Tree = {**json.loads(plan.to_json()), "started": 1795172580.0}

    def connect(self, host: Host) -> Connection:
        return Disk(host.name, self.folder / host.name, self.used[host.name])

    def says(self, tree: Tree, host: str = "evil", run_id: str = RUN_ID) -> None:
        path = self.folder / host / "runs" / run_id / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree))

    def worker(self, **changes: object) -> Tree:
        """Return the plan with another worker-1, which is on `good`."""
        first, second, third = self.tree["processes"]
        return {**self.tree, "processes": [first, second, {**third, **changes}]}

    def run(self) -> Any:
        return Registry.for_hosts(self.inventory).get_run(RUN_ID)


_CPU = Device("cpu", "cpu")


@pytest.fixture
def lab(tmp_path: Path, silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setattr("launcher.hosts.ssh.connect_host", made.connect)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "localhost"))
    return made


@pytest.fixture
def real_connect() -> Callable[[Host], Connection]:
    return ssh.connect_host


@pytest.mark.parametrize("way", ["ssh", "local", "none"])
def test_a_host_that_the_inventory_lacks_is_unreachable_whatever_its_plan_says(
    real_connect: Callable[[Host], Connection],
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    proof = tmp_path / "a command ran here"
    stranger = {
        **lab.tree["hosts"][1],
        "name": "stranger",
        "connection": way,
        "address": "127.0.0.1",
        "ssh_args": ["-o", f"ProxyCommand=touch '{proof}'"],
        "ssh_key": "/etc/shadow",
        "state_folder": str(tmp_path / "localhost"),
    }
    tree = lab.worker(host="stranger")
    lab.says({**tree, "hosts": [tree["hosts"][0], stranger]})

    def connect(host: Host) -> Connection:
        return real_connect(host) if host.name == "stranger" else lab.connect(host)

    monkeypatch.setattr("launcher.hosts.ssh.connect_host", connect)
    view = RunMonitor(lab.run()).observe()
    assert view.processes["worker-1"].state == "unreachable"
    assert "the run's plan names it, but the inventory does not" in view.unreachable["stranger"]
    ending = tear_down(lab.run(), grace=0.1)
    assert list(ending.left) == ["stranger"]
    assert not proof.exists()
    assert lab.used["localhost"] == []


@pytest.mark.parametrize("host", ["good", "localhost"])
@pytest.mark.parametrize(
    "folder", ["../../..", "/etc", "/", "relative", "-rf", "/var/lib/motley/../../etc/x"]
)
def test_no_path_of_a_plan_is_used_on_any_host(lab: Lab, host: str, folder: str) -> None:
    tree = lab.worker(
        host=host, folder=folder, report_file=f"{folder}/beat.json", argv=["sh", "-c", "x"]
    )
    hosts = [{**each, "state_folder": folder} for each in tree["hosts"]]
    hosts.append({**hosts[1], "name": "localhost", "connection": "local"})
    lab.says({**tree, "hosts": hosts})
    run = lab.run()
    (lab.folder / host / "runs" / RUN_ID).mkdir(parents=True)
    monitor = RunMonitor(run)
    view = monitor.observe()
    process = run.plan.find_process("worker-1")
    monitor.last_lines(process)
    monitor.find_supervisor(process).log_offset(process, 1, 0.0)
    tear_down(run, grace=0.1)
    assert view.processes["worker-1"].state == "absent"
    assert process.argv == ()
    inside = str(lab.folder / host / "runs")
    assert lab.used[host]
    assert {path for path in lab.used[host] if not path.startswith(inside)} == set()


def test_where_a_process_reports_says_the_plan_of_its_own_host(lab: Lab) -> None:
    """Else one host could have another one read, and hand over, any file of its own."""
    secret = lab.folder / "good" / "secret" / "status.json"
    secret.parent.mkdir(parents=True)
    secret.write_text(json.dumps({"run_id": RUN_ID, "state": "running", "reason": "secret"}))
    leader = {**lab.tree["processes"][0], "host": "good"}
    tree = {**lab.tree, "processes": [leader, *lab.tree["processes"][1:]]}
    lab.says({**tree, "output": str(secret.parent)})
    write_state(lab.folder / "good" / "runs" / RUN_ID / "processes" / "coordinator")
    assert RunMonitor(lab.run()).observe().training is None
    lab.says({**tree, "output": str(secret.parent)}, host="good")
    view = RunMonitor(lab.run()).observe()
    assert view.training is not None
    assert view.training["reason"] == "secret"


def write_state(folder: Path, **changes: object) -> None:
    tree = {"state": "running", "attempt": 1, "failures": 0, "supervisor": None, "child": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({**tree, **changes}))


HOSTILE_PLANS: dict[str, Callable[[Lab], Tree]] = {
    "another id": lambda lab: {**lab.tree, "run_id": "../../etc"},
    "a name that is a path": lambda lab: lab.worker(name="../../../etc/cron.d"),
    "a name that is an option": lambda lab: lab.worker(name="--user"),
    "a unit's name": lambda lab: lab.worker(name="worker-1.service x"),
    "another rank": lambda lab: lab.worker(rank=0),
    "a role of its own": lambda lab: lab.worker(role="root"),
    "a host in two lines": lambda lab: lab.worker(host="good\nevil"),
    "a host that is none of it": lambda lab: lab.worker(host="elsewhere"),
    "no process": lambda lab: {**lab.tree, "processes": []},
    "two of one name": lambda lab: {**lab.tree, "processes": lab.tree["processes"][:1] * 2},
    "no leader": lambda lab: {**lab.tree, "processes": lab.tree["processes"][1:]},
    "a time beyond the calendar": lambda lab: {**lab.tree, "started": 1e300},
    "no number": lambda lab: {**lab.tree, "started": math.nan},
    "a list": lambda lab: {**lab.tree, "hosts": "evil"},
    "another schema": lambda lab: {**lab.tree, "schema": "motley.plan/9"},
}


@pytest.mark.parametrize("what", HOSTILE_PLANS)
def test_a_plan_of_another_shape_is_damaged(lab: Lab, what: str) -> None:
    lab.says(HOSTILE_PLANS[what](lab))
    assert Registry.for_hosts(lab.inventory).read_runs() == []
    with pytest.raises(ConfigError, match=r"plan\.json: damaged: .+"):
        lab.run()


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"{" * 100_000, b"\xff\xfe", b"", b"null", b"1" * 10_000]
)
def test_what_is_no_plan_at_all(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"motley\.plan/2: .+"):
        read_record(data, RUN_ID)


@pytest.mark.parametrize("name", ["..", "-x", "a/b", "a b", "A", "x" * 200, ""])
def test_a_folder_that_cannot_be_a_run_is_none(lab: Lab, name: str) -> None:
    if name in ("-x", "a b", "A"):
        (lab.folder / "evil" / "runs" / name).mkdir(parents=True)
    assert Registry.for_hosts(lab.inventory).read_runs() == []
    with pytest.raises(ConfigError, match="no run"):
        find_run(Registry.for_hosts(lab.inventory), name)


@pytest.mark.parametrize(
    "state",
    [
        {"state": "on fire"},
        {"state": 7},
        {"attempt": "many"},
        {"supervisor": {"pid": "1", "start": [], "boot": 3}},
        {"supervisor": [1, 2]},
        {"exit_code": "zero"},
        {"message": {"a": 1}},
    ],
)
def test_a_state_of_another_shape_costs_that_process_alone(lab: Lab, state: Tree) -> None:
    lab.says(lab.tree)
    processes = lab.folder / "good" / "runs" / RUN_ID / "processes"
    write_state(processes / "worker-1", **state)
    view = RunMonitor(lab.run()).observe()
    assert view.processes["worker-1"].state == "lost"
    assert (view.processes["worker-1"].message or "").startswith("state.json: ")
    assert view.processes["worker-0"].state == "absent"


@pytest.mark.parametrize(
    "report",
    [
        {"workers": 3},
        {"workers": [3]},
        {"workers": [{"rank": [], "state": "active"}]},
        {"workers": [{"rank": 0, "state": {}}]},
        {"step": "12", "total_steps": 100},
        {"reason": ["because"]},
        {"loss": "low"},
        {"updated": "now"},
        [],
        "[" * 50_000,
    ],
)
def test_a_report_of_another_shape_is_none(lab: Lab, report: object) -> None:
    lab.says(lab.tree)
    write_state(lab.folder / "evil" / "runs" / RUN_ID / "processes" / "coordinator")
    lab.output.mkdir(parents=True)
    tree = {"run_id": RUN_ID, "state": "running", "updated": 2e9}
    text = report if isinstance(report, str) else json.dumps(report)
    if isinstance(report, dict):
        text = json.dumps({**tree, **report})
    (lab.output / "status.json").write_text(text)
    view = RunMonitor(lab.run()).observe()
    assert (view.training, view.joined_ranks) == (None, [])


@pytest.mark.parametrize("odd", [10**3000, math.inf, math.nan])
def test_an_odd_figure_of_a_report_is_shown_as_invalid(lab: Lab, odd: float) -> None:
    lab.says(lab.tree)
    write_state(lab.folder / "evil" / "runs" / RUN_ID / "processes" / "coordinator")
    lab.output.mkdir(parents=True)
    figures = {"step": 3, "total_steps": 9, "loss": odd, "validation": {"accuracy": odd}}
    tree = {"run_id": RUN_ID, "state": "running", "updated": 2e9, **figures}
    (lab.output / "status.json").write_text(json.dumps(tree))
    view = RunMonitor(lab.run()).observe()
    assert view.training is not None
    shown = format_progress(view.training)
    assert shown == "step 3/9, loss -, invalid in its report: loss, validation.accuracy"


def test_names_of_logs_that_are_no_numbers_are_passed_over(lab: Lab) -> None:
    lab.says(lab.tree)
    folder = lab.folder / "good" / "runs" / RUN_ID / "processes" / "worker-1"
    folder.mkdir(parents=True)
    for name in ("attempt-².log", "attempt-1.log", f"attempt-{'9' * 99}.log", "attempt-x.log", "3"):
        (folder / name).touch()
    run = lab.run()
    process = run.plan.find_process("worker-1")
    assert RunMonitor(run).find_supervisor(process).list_attempts(process) == [1]


def test_the_inventory_names_a_host_of_the_plan_that_is_away(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way there is the inventory's: a host of its name in the plan changes nothing."""
    hosts = [lab.tree["hosts"][0], {**lab.tree["hosts"][1], "address": "6.6.6.6", "user": "root"}]
    lab.says({**lab.tree, "hosts": hosts})
    assert lab.run().find_host("good") is lab.inventory[1]
    monkeypatch.setattr("launcher.hosts.ssh.connect_host", refuse)
    with pytest.raises(UnreachableError, match="no route"):
        Registry.for_hosts(lab.inventory)


def refuse(host: Host) -> Connection:
    raise UnreachableError(f"host {host.name}: no route")


@pytest.mark.cluster
def test_a_program_that_never_stops_printing_is_ended(server: Server, own_ssh: None) -> None:
    pipe = SshPipe("host far", resolve_route(server.host()), f"echo '{STARTED}' >&2; cat")
    try:
        for program in (("yes",), ("sh", "-c", "yes >&2")):
            with pytest.raises(OSError, match="the program printed more than 1,048,576 characters"):
                pipe.run_program(program, 60.0)
        code, output = pipe.run_program(("sh", "-c", "yes | head -c 1000000; exit 7"), 60.0)
        assert (code, len(output)) == (7, 1_000_000)
    finally:
        pipe.close()


@pytest.mark.cluster
def test_a_host_that_floods_stderr_costs_nothing(server: Server, own_ssh: None) -> None:
    """Neither lines without an end nor lines without number are kept."""
    route = resolve_route(server.host())
    flood = f"echo '{STARTED}' >&2; head -c 5000000 /dev/zero >&2; yes | head -c 5000000 >&2; cat"
    pipe = SshPipe("host far", route, flood)
    try:
        pipe.send(b"here")
        while (data := pipe.receive(10.0)) is None:
            pass
        assert data == b"here"
        assert len(pipe.last_output()) < 100_000
    finally:
        pipe.close()
