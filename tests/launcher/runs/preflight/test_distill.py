"""What preflight finds out about a distillation: models, texts, folders, one share and not two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.checks.finding import Finding
from launcher.agent.checks.job import check_data, check_model_folder, check_text
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.facts.machine import describe_machine
from launcher.inventory.hosts import Host
from launcher.plan.distillation import place_distillation
from launcher.plan.placement import PlanContext
from launcher.plan.plan import LaunchPlan
from launcher.runs.preflight import distill
from launcher.runs.preflight.check import CheckContext, HostCheck
from launcher.runs.preflight.inspection import CHECKS
from tests.launcher.hollow_model import make_model
from tests.launcher.played_hosts import Units
from trainer.config.distill_job import load_job

SETTING = PlanContext(run_id="x-1", trainer_command=("t",), state_folder="/s", routes={})
CPU = (Device("cpu", "cpu"),)


class Pair:
    """Two hosts that see folders of this machine, and the plan of a distillation over them."""

    def __init__(
        self,
        folder: Path,
        teachers_share: Path,
        students_share: Path,
        more: Mapping[str, object] | None = None,
    ) -> None:
        for part in (teachers_share, students_share):
            for name in ("logits", "checkpoints"):
                (part / name).mkdir(parents=True, exist_ok=True)
        (folder / "inputs").mkdir()
        (folder / "inputs" / "text").write_text("hello\n")
        state = str(folder)
        ram = Host(name="ram", state_folder=state, devices=CPU, share_folder=str(teachers_share))
        gpu = Host(name="gpu", state_folder=state, devices=CPU, share_folder=str(students_share))
        hosts = (replace(ram, teacher=True), replace(gpu, student=True))
        settings = {"teacher.model": "inputs/t", "teacher.data": ["inputs/text"]}
        self.job = job = load_job(
            None,
            settings
            | {"student.model": "inputs/s", "evaluation.data": ["inputs/h"]}
            | dict(more or {}),
        )
        self.plan: LaunchPlan = place_distillation(hosts, job, SETTING)
        here = describe_machine()
        self.found = Survey(
            hosts=hosts,
            machines={"ram": here, "gpu": replace(here, identity="another")},
            connections={"ram": LocalConnection(), "gpu": LocalConnection()},
        )

    def checks(self) -> dict[tuple[str, str], HostCheck]:
        context = CheckContext(self.found, ["ram", "gpu"], self.plan, self.job)
        checks = [each for check in CHECKS for each in check.of_hosts(context, "distillation")]
        return {(each.host, each.check.name): each for each in checks}

    def run(self, check: HostCheck) -> Finding:
        return check.run(self.found.connections[check.host])

    def findings(self, *names: str) -> dict[tuple[str, str], Finding]:
        return {key: self.run(each) for key, each in self.checks().items() if key[1] in names}


def test_each_host_is_asked_for_what_its_processes_need(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tmp_path / "share", tmp_path / "share")
    assert set(pair.checks()) == {
        ("gpu", "model"),
        ("gpu", "output"),
        ("gpu", "logits"),
        ("gpu", "checkpoints"),
        ("ram", "model"),
        ("ram", "data"),
        ("ram", "validation"),
        ("ram", "logits"),
        ("ram", "checkpoints"),
    }
    found = pair.findings("model", "data", "validation")
    assert found["ram", "data"] == Finding("ok", f"{tmp_path}/inputs/text")
    assert found["ram", "validation"].status == "fail"
    assert f"no model folder {tmp_path}/inputs/t" in found["ram", "model"].detail
    assert f"no model folder {tmp_path}/inputs/s" in found["gpu", "model"].detail


def test_one_share_under_two_paths_is_one(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "share")
    pair = Pair(tmp_path, tmp_path / "share", tmp_path / "mounted")
    for finding in pair.findings("logits", "checkpoints").values():
        assert finding.status == "ok"
    assert pair.findings("logits")["ram", "logits"].detail.endswith("the same as on gpu")
    assert list((tmp_path / "share" / "logits").iterdir()) == []


def test_two_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    """As with `share_mode: rsync`: the student would wait for a teacher that writes elsewhere."""
    pair = Pair(tmp_path, tmp_path / "one", tmp_path / "other")
    finding = pair.findings("logits")["ram", "logits"]
    assert finding.status == "fail"
    assert (
        finding.detail
        == f"{tmp_path}/one/logits/distill is not gpu's {tmp_path}/other/logits/distill"
    )
    assert "mount the shared folder" in finding.remedy


def test_units_are_asked_about_every_folder(tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    pair = Pair(tmp_path, tmp_path / "share", tmp_path / "share")
    pair.found = replace(pair.found, connections={"ram": Units(asked), "gpu": LocalConnection()})
    assert pair.run(pair.checks()["ram", "unit"]).status == "ok"
    units = asked["fences"]["units"]
    assert set(units) == {
        "motley-worker@x-1:teacher-0.service",
        "motley-worker@x-1:evaluator-0.service",
    }
    teacher = units["motley-worker@x-1:teacher-0.service"]
    assert teacher["reads"] == [f"{tmp_path}/inputs/t", f"{tmp_path}/inputs/text"]
    assert f"{tmp_path}/share/logits/distill" in teacher["writes"]


def test_a_model_folder_is_whole_or_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    make_model(model)
    assert check_model_folder(model).detail == f"{model} lacks tokenizer.json"
    (model / "tokenizer.json").write_text("{}")
    assert check_model_folder(model).status == "ok"
    (model / "config.json").unlink()
    lacking = check_model_folder(model)
    assert (lacking.status, "config.json" in lacking.detail) == ("fail", True)
    absent = check_model_folder(tmp_path / "absent")
    assert absent.remedy.startswith("copy it there with launch sync inputs")


@pytest.mark.parametrize(("name", "status"), [("text", "ok"), ("folder", "ok"), ("none", "fail")])
def test_texts_are_files_or_folders(tmp_path: Path, name: str, status: str) -> None:
    (tmp_path / "text").write_text("a")
    (tmp_path / "folder").mkdir()
    assert check_text(tmp_path / name).status == status


class Asking(LocalConnection):
    """A host that answers every question, and notes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[Mapping[str, Any]] = []

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, deadline: float = 1.0
    ) -> Any:
        self.arguments.append(arguments or {})
        return {"status": "ok", "detail": "fine"}


def test_samples_are_checked_by_their_names_of_keys(tmp_path: Path) -> None:
    """Of the student and of the evaluator, whose problems have keys of their own."""
    settings = {
        "student.validation": "inputs/v.jsonl",
        "student.columns": {"text": "own"},
        "evaluation.data": ["inputs/h.jsonl", "hf://datasets/owner/name"],
        "evaluation.columns": {"text": "body"},
        "evaluation.problems": "inputs/p.jsonl",
    }
    pair = Pair(tmp_path, tmp_path / "share", tmp_path / "share", settings)
    for name, key in (("v", "own"), ("h", "body"), ("p", "prompt")):
        (tmp_path / "inputs" / f"{name}.jsonl").write_text(f'{{"{key}": "a"}}\n')
    asking = {"ram": Asking(), "gpu": Asking()}
    found = replace(pair.found, connections=asking)
    cluster = CheckContext(found, [*asking], pair.plan, pair.job)
    for name in cluster.names:
        for find, _ in distill.held_out(cluster, name):
            assert find(asking[name]) == Finding("ok", "fine")
    asked = {
        (name, each["path"]): each["columns"]
        for name, connection in asking.items()
        for each in connection.arguments
    }
    assert asked == {
        ("gpu", f"{tmp_path}/inputs/v.jsonl"): {"text": "own"},
        ("ram", f"{tmp_path}/inputs/h.jsonl"): {"text": "body"},
        ("ram", "hf:/datasets/owner/name"): {"text": "body"},
        ("ram", f"{tmp_path}/inputs/p.jsonl"): {},
    }
    for (_, path), columns in asked.items():
        if not path.startswith("hf:"):
            assert check_data(Path(path), "another", dict(columns)).status == "ok", path
