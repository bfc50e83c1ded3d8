"""Model and data: the same content everywhere, each host's digests asked for once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.checks.digests import file_content
from launcher.agent.checks.finding import Finding
from launcher.errors import UnreachableError
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.facts.machine import describe_machine
from launcher.inventory.hosts import Host
from launcher.plan.placement import PlanContext, place_run
from launcher.plan.plan import LaunchPlan
from launcher.runs.preflight.check import CheckContext, HostCheck
from launcher.runs.preflight.content import HostDigests, compare_content
from launcher.runs.preflight.inspection import CHECKS
from tests.launcher.played_hosts import Units
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder
from trainer.config.run import RunConfig, load_config

FINE = Finding("ok", "/data/train.jsonl")
LESSON = {"task": "causal-lm", "distillation.alpha": 0.7}
"""What makes a run one that learns from a teacher."""


class Counting(LocalConnection):
    """This machine, with every question noted."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 1.0
    ) -> Any:
        self.asked.append(name)
        return super().call(name, arguments, deadline)


def checks_of(found: Survey, plan: LaunchPlan, config: RunConfig, names: str) -> list[HostCheck]:
    """Return the checks of the run itself."""
    context = CheckContext(found, list(names), plan, config)
    return [each for check in CHECKS for each in check.of_hosts(context, "training")]


def content(folder: Path, text: str, connection: LocalConnection | None = None) -> HostDigests:
    folder.mkdir()
    (folder / "train.jsonl").write_text(text)
    there, path = connection or LocalConnection(), str(folder / "train.jsonl")
    return HostDigests(lambda: there.ask(file_content, path, str(folder)))


def test_a_failed_check_is_not_hashed_besides(tmp_path: Path) -> None:
    connection = Counting()
    own = content(tmp_path / "own", "one\n", connection)
    bad = Finding("fail", "no such file", "give --data FILE")
    assert compare_content(lambda _: bad, own, own, "intel", connection) is bad
    assert connection.asked == []


def test_the_coordinators_digests_are_asked_for_once(tmp_path: Path) -> None:
    connection = Counting()
    head = content(tmp_path / "head", "one\n", connection)
    for name in ("a", "b"):
        own = content(tmp_path / name, "one\n")
        compare_content(lambda _: FINE, own, head, "intel", connection)
    assert connection.asked == ["file_content"]


def test_a_host_that_goes_away_meanwhile(tmp_path: Path) -> None:
    class Gone(LocalConnection):
        def call(self, *_: object, **__: object) -> object:
            raise UnreachableError("host a: no answer")

    head = content(tmp_path / "head", "one\n")
    own = content(tmp_path / "a", "", Gone())
    finding = compare_content(lambda _: FINE, own, head, "intel", Gone())
    assert finding.detail.endswith("cannot be compared with intel's: host a: no answer")


@pytest.mark.parametrize("job", [{"num_classes": 2}, LESSON], ids=["alone", "taught"])
@pytest.mark.parametrize(
    ("shared", "folder", "compared"),
    [
        (None, "/srv/motley", True),
        ("/srv/motley", "/srv/motley", False),
        ("/srv/motley", "/", True),
    ],
)
def test_what_lies_on_the_share_is_one_file(
    shared: str | None, folder: str, compared: bool, job: dict[str, Any]
) -> None:
    """Hashing it on every host would read the same gigabytes over the network again and again."""
    cpu = (Device("cpu", "cpu"),)
    head = Host(name="a", coordinator=True, bind_address="10.0.0.1", devices=cpu)
    hosts = tuple(
        replace(host, share_folder=shared) for host in (head, Host(name="b", devices=cpu))
    )
    paths = {"model.path": f"{folder}/model", "data.train": f"{folder}/t", "data.validation": None}
    config = load_config(None, {**paths, **job, "output": "/out"})
    here = describe_machine()
    found = Survey(
        hosts=hosts,
        machines={"a": here, "b": replace(here, identity="another")},
        connections={"a": LocalConnection(), "b": LocalConnection()},
    )
    setting = PlanContext(run_id="x-1", trainer_command=("t",), state_folder="/s", routes={})
    checks = checks_of(found, place_run(hosts, config, None, setting), config, "ab")
    there = {each.check.name: each.find for each in checks if each.host == "b"}
    for name in ("model", "data"):
        assert (getattr(there[name], "func", None) is compare_content) is compared


def test_a_folder_of_logits_is_compared_by_its_shards(tmp_path: Path) -> None:
    class Elsewhere(LocalConnection):
        """A host with a folder of its own at the path that the job names."""

        def __init__(self, folder: Path) -> None:
            super().__init__()
            self.folder = folder

        def call(
            self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 1.0
        ) -> Any:
            own = {"path": str(self.folder), "state_folder": str(tmp_path / "state")}
            given = dict(arguments or {})
            if name == "training_data":
                data = {**given["config"]["data"], "train": own["path"]}
                given = {"config": {**given["config"], "data": data}}
            return super().call(name, given | {key: own[key] for key in own if key in given})

    description = tiny_description(SCHEMES["topk"])
    folders = {name: tiny_folder(tmp_path / name, description) for name in "abcd"}
    folders["c"].shard_path(2).rename(tmp_path / "moved")
    other = tiny_folder(tmp_path / "other", replace(description, seed=8))
    folders["d"].shard_path(0).rename(tmp_path / "replaced")
    other.shard_path(0).rename(folders["d"].shard_path(0))
    cpu = (Device("cpu", "cpu"),)
    head = Host(name="a", coordinator=True, bind_address="10.0.0.1", devices=cpu)
    hosts = (head, *(Host(name=name, devices=cpu) for name in "bcd"))
    paths = {"model.path": "/srv/model", "data.train": "/srv/logits", "output": "/out"}
    config = load_config(None, {**paths, **LESSON})
    here = describe_machine()
    found = Survey(
        hosts=hosts,
        machines={name: replace(here, identity=name) for name in "abcd"},
        connections={name: Elsewhere(folders[name].path) for name in "abcd"},
    )
    setting = PlanContext(run_id="x-1", trainer_command=("t",), state_folder="/s", routes={})
    checks = checks_of(found, place_run(hosts, config, None, setting), config, "abcd")
    findings = {
        each.host: each.run(found.connections[each.host])
        for each in checks
        if each.check.name == "data"
    }
    assert [findings[name].status for name in "abcd"] == ["ok", "ok", "fail", "fail"]
    whole = "3 shards of a teacher's logits"
    assert findings["a"].detail == f"{folders['a'].path}, {whole}"
    assert findings["b"].detail == f"{folders['b'].path}, {whole}, the same as on a"
    assert findings["c"].detail.endswith(
        "1 of 3 shards are missing or damaged, such as shard-00002"
    )
    assert findings["d"].detail.endswith(f"{whole}: has another shard-00000 than a")
    assert "launch sync inputs" in findings["d"].remedy


def test_units_are_asked_about_every_folder_of_the_run() -> None:
    """Of each role on a host one unit, for what its processes read and write there."""

    asked: dict[str, Any] = {}
    cpu = (Device("cpu", "cpu"),)
    head = Host(name="a", coordinator=True, bind_address="10.0.0.1", devices=cpu)
    hosts = (head, Host(name="b", devices=cpu))
    paths = {"model.path": "Qwen/Qwen3-4B", "data.train": "/t", "data.validation": "/v"}
    places = {"output": "/out", "checkpoint.folder": "/srv/motley/checkpoints/x"}
    config = load_config("quickstart", paths | places)
    here = describe_machine()
    found = Survey(
        hosts=hosts,
        machines={"a": here, "b": replace(here, identity="another")},
        connections={"a": Units(asked), "b": LocalConnection()},
    )
    setting = PlanContext(run_id="x-1", trainer_command=("t",), state_folder="/s", routes={})
    checks = checks_of(found, place_run(hosts, config, None, setting), config, "ab")
    (unit,) = [each for each in checks if each.check.name == "unit"]
    assert unit.host == "a"
    assert unit.run(found.connections[unit.host]).status == "ok"
    reads = ["/t", "/v"]  # a hub name is no path
    assert asked["fences"]["units"] == {
        "motley-coordinator@x-1:coordinator.service": {
            "reads": reads,
            "writes": ["/var/lib/motley", "/out", "/srv/motley/checkpoints/x"],
        },
        "motley-worker@x-1:worker-0.service": {"reads": reads, "writes": ["/var/lib/motley"]},
    }
