"""Placement of distillations over tables of clusters. It is pure: no machine is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import run
from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.configuration import resolve_job
from launcher.plan.distillation import place_distillation
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.plan.plan_context import PlanContext
from tests import ROOT
from trainer.config import distill_job
from trainer.config import run as run_config
from trainer.config.distill_job import DistillJob
from trainer.config.section import parse_assignments
from trainer.system.errors import InputError
from trainer.system.untrusted_data import validate_data

RUN = "distill-20261121-200000-7f3a"
SETTING = PlanContext(
    run_id=RUN, trainer_command=("/venv/bin/trainer",), state_folder="/state", routes={}
)
RTX = Device("cuda", "GPU-4090", "RTX 4090", 24 << 30)
RADEON = Device("wgpu", "0000:0b:00.0")
INTEL = Host(
    name="intel",
    coordinator=True,
    devices=(RADEON,),
    cores=32,
    memory=300 << 30,
    share_folder="/srv/motley",
)
LAMBDA = Host(name="lambda", devices=(RTX,), cores=16, memory=64 << 30, share_folder="/mnt/motley")
HERE = Host(
    name="localhost",
    connection="local",
    devices=(Device("cpu", "cpu"),),
    cores=8,
    memory=16 << 30,
)


LEAST: dict[str, Any] = {
    "teacher.model": "inputs/teacher",
    "teacher.data": ["inputs/corpus"],
    "student.model": "inputs/student",
    "evaluation.data": ["inputs/held-out.jsonl"],
}
"""What a job has to say."""


def job(**settings: Any) -> DistillJob:
    return distill_job.load_job(None, LEAST | settings)


def flags(process: ProcessPlan, name: str) -> list[str]:
    return [process.argv[i + 1] for i, word in enumerate(process.argv) if word == name]


def who_is_where(plan: LaunchPlan) -> dict[str, str]:
    return {process.name: process.host for process in plan.processes}


def named(plan: LaunchPlan, name: str) -> ProcessPlan:
    found = plan.find_process(name)
    assert found is not None
    return found


def test_the_reference_cluster_needs_no_word_about_roles() -> None:
    plan = place_distillation([INTEL, LAMBDA], job(), SETTING)
    assert who_is_where(plan) == {"student": "lambda", "teacher-0": "intel", "evaluator-0": "intel"}
    assert plan.leader.role == "student"
    assert (plan.leader.device, plan.leader.backend, plan.leader.threads) == (
        "GPU-4090",
        "cuda",
        None,
    )
    assert flags(plan.leader, "--gpu") == ["GPU-4090"]
    assert (plan.port, plan.bind_address, plan.workers) == (None, "", ())
    assert all(not process.certificate_names and not process.address for process in plan.processes)
    assert validate_data(LaunchPlan, json.loads(plan.to_json()), "plan") == plan


def test_with_a_budget_all_end_with_the_student_and_it_waits_for_the_scores() -> None:
    for process in place_distillation([INTEL, LAMBDA], job(), SETTING).processes:
        assert not {"--with-student", "--await-scores"} & set(process.argv)
    budget = {"ceiling": 5.0, "currency": "EUR", "hosts": [{"name": "a b", "price_hour": 1.5}]}
    with_one = job(budget=budget)
    student, teacher, evaluator = place_distillation([INTEL, LAMBDA], with_one, SETTING).processes
    assert "--await-scores" in student.argv
    assert "--with-student" in teacher.argv
    assert "--with-student" in evaluator.argv
    (said,) = [text for text in flags(student, "--set") if text.startswith("budget=")]
    told = run_config.load_config("student", parse_assignments([said], "--set"))
    assert told.budget == with_one.budget
    without = with_one.model_copy(update={"evaluation": None})
    alone = place_distillation([INTEL, LAMBDA], without, SETTING)
    assert "--await-scores" not in alone.leader.argv


def test_each_host_finds_the_share_at_its_own_place() -> None:
    plan = place_distillation([INTEL, LAMBDA], job(logits="first"), SETTING)
    student, teacher, evaluator = plan.processes
    assert flags(student, "--teacher-logits") == ["/mnt/motley/logits/first"]
    assert flags(teacher, "--out") == ["/srv/motley/logits/first"]
    assert f"checkpoint.folder=/mnt/motley/checkpoints/{RUN}" in flags(student, "--set")
    assert flags(evaluator, "--watch") == [f"/srv/motley/checkpoints/{RUN}"]
    assert flags(teacher, "--until") == [f"/srv/motley/checkpoints/{RUN}/status.json"]
    assert teacher.report_file == "/srv/motley/logits/first/teachers/teacher-0.json"
    assert plan.output == "/var/lib/motley/outputs/distill"
    assert student.required_paths == {"model": ("/var/lib/motley/inputs/student",)}
    assert teacher.required_paths == {
        "model": ("/var/lib/motley/inputs/teacher",),
        "data": ("/var/lib/motley/inputs/corpus",),
    }
    assert student.writable_folders == {
        "output": "/var/lib/motley/outputs/distill",
        "logits": "/mnt/motley/logits/first",
        "checkpoints": f"/mnt/motley/checkpoints/{RUN}",
    }


def test_the_shipped_job_on_the_reference_inventory(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--dry-run` prints; no host is asked, since the inventory lists their devices."""
    inventory = ROOT / "inventory" / "hosts.yml"
    arguments = ["distill", "up", "-i", str(inventory), "--config", "albor-350m", "--dry-run"]
    assert run([*arguments, "--set", "name=mine"]) == 0
    hosts = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[0] for text in hosts if text.strip()] == [
        "# intel (SSH to 192.168.50.20)",
        "# lambda (SSH to 192.168.50.30)",
    ]
    assert [line for line in hosts[0].splitlines()[1:] if line[0] == "#"] == [
        "# teacher-0",
        "# evaluator-0",
    ]
    assert (
        "--student-config albor-350m --tokenizer /var/lib/motley/inputs/tokenizer-32k" in hosts[1]
    )
    assert "--gpu-backend cuda --gpu 0000:01:00.0" in hosts[1]
    assert "/srv/motley/checkpoints/mine-20" in hosts[1]


def test_the_inventory_has_the_last_word() -> None:
    hosts = [
        replace(INTEL, student=True),
        replace(LAMBDA, teacher=True),
        replace(LAMBDA, name="third", evaluator=True),
    ]
    plan = place_distillation(hosts, job(), SETTING)
    assert who_is_where(plan) == {"student": "intel", "teacher-0": "lambda", "evaluator-0": "third"}
    assert plan.leader.backend == "cpu"  # students are trained by torch: no Radeon


def test_two_students_are_refused() -> None:
    hosts = [replace(INTEL, student=True), replace(LAMBDA, student=True)]
    with pytest.raises(ConfigError, match="motley_student is true on intel, lambda"):
        place_distillation(hosts, job(), SETTING)


def test_teachers_split_the_corpus_over_their_hosts() -> None:
    hosts = [LAMBDA, replace(INTEL, teacher=True), replace(INTEL, name="third", teacher=True)]
    plan = place_distillation(hosts, job(**{"teacher.processes": 3}), SETTING)
    teachers = plan.processes[1:4]
    assert [t.host for t in teachers] == ["intel", "third", "intel"]
    assert [flags(t, "--workers") for t in teachers] == [["1/3"], ["2/3"], ["3/3"]]
    assert [flags(t, "--name") for t in teachers] == [["teacher-0"], ["teacher-1"], ["teacher-2"]]
    # The evaluator, beside the first teacher, has a quarter of the cores; teachers share the rest.
    assert [t.threads for t in teachers] == [12, 32, 12]
    assert named(plan, "evaluator-0").threads == 8
    assert len(place_distillation(hosts, job(), SETTING).processes) == 4  # one on each such host


def cards(count: int) -> tuple[Device, ...]:
    return tuple(Device("cuda", f"GPU-{number}", "RTX 4090", 24 << 30) for number in range(count))


def test_a_teacher_has_a_card_of_its_own_if_there_is_one() -> None:
    """Beside the student's, and on the host that has more cards than another."""
    one = replace(LAMBDA, devices=cards(2))
    student, teacher, _ = place_distillation(
        [one], job(**{"teacher.backend": "cuda"}), SETTING
    ).processes
    assert (student.device, teacher.device) == ("GPU-0", "GPU-1")
    few, many = (
        replace(LAMBDA, name=name, devices=cards(count), teacher=True)
        for name, count in (("few", 1), ("many", 3))
    )
    wanted = job(**{"teacher.backend": "cuda", "teacher.processes": 4})
    hosts = [few, many, replace(LAMBDA, student=True)]
    teachers = place_distillation(hosts, wanted, SETTING).processes[1:5]
    assert sorted((each.host, each.device) for each in teachers) == [
        ("few", "GPU-0"),
        ("many", "GPU-0"),
        ("many", "GPU-1"),
        ("many", "GPU-2"),
    ]


def test_fewer_teachers_than_hosts_are_on_the_best_ones() -> None:
    """As `launch plan --distill` counts them: it leaves out those that others would wait for."""
    hosts = [
        replace(INTEL, name=f"box-{cores}", cores=cores, coordinator=False, teacher=True)
        for cores in (2, 32, 16)
    ]
    wanted = job(**{"teacher.processes": 2})
    processes = place_distillation([*hosts, LAMBDA], wanted, SETTING).processes
    assert [each.host for each in processes if each.role == "teacher"] == ["box-32", "box-16"]


def test_this_machine_shares_its_cores_out(tmp_path: Path) -> None:
    wanted = resolve_job(None, LEAST, [HERE], tmp_path)
    plan = place_distillation([HERE], wanted, SETTING)
    assert [process.threads for process in plan.processes] == [3, 3, 2]
    assert all(process.env["OMP_NUM_THREADS"] for process in plan.processes)
    student, teacher, evaluator = plan.processes
    assert flags(student, "--student") == [f"{tmp_path}/inputs/student"]
    assert flags(student, "--teacher-logits") == flags(teacher, "--out") == [f"{tmp_path}/distill"]
    assert flags(student, "--set") == []
    assert flags(evaluator, "--watch") == [plan.output] == [f"{tmp_path}/outputs/distill"]
    assert plan.leader.argv[:3] == ("/venv/bin/trainer", "distill", "student")


def test_settings_reach_their_commands() -> None:
    wanted = job(
        **{
            "teacher.scheme": "sampled",
            "teacher.samples": 25,
            "teacher.engine": "openvino",
            "teacher.tokenizer": "inputs/small",
            "student.distillation.alpha": 0.5,
            "student.training": {"batch_size": 8, "max_steps": 30},
            "student.optimizer.learning_rate": 1e-3,
            "evaluation.tasks": ["loss", "generate"],
            "evaluation.backend": "wgpu",
        }
    )
    student, teacher, evaluator = place_distillation([INTEL, LAMBDA], wanted, SETTING).processes
    assert flags(student, "--set")[:4] == [
        "distillation.alpha=0.5",
        "optimizer.learning_rate=0.001",
        "training.max_steps=30",
        "training.batch_size=8",
    ]
    assert (flags(teacher, "--scheme"), flags(teacher, "--samples")) == (["sampled"], ["25"])
    assert flags(teacher, "--tokenizer") == ["/var/lib/motley/inputs/small"]
    assert flags(teacher, "--engine") == ["openvino"]
    assert flags(teacher, "--top-k") == []  # what the job does not say is the command's to choose
    assert "--stay" in teacher.argv
    assert flags(evaluator, "--tasks") == ["loss,generate"]
    assert (evaluator.device, flags(evaluator, "--gpu")) == (RADEON.id, [RADEON.id])


def test_eval_runners_have_a_card_each_while_the_processor_teaches() -> None:
    second = replace(RADEON, id="0000:0f:00.0")
    wanted = job(**{"evaluation.backend": "wgpu", "evaluation.processes": 2})
    pair = replace(INTEL, devices=(RADEON, second))
    _, teacher, *evaluators = place_distillation([pair, LAMBDA], wanted, SETTING).processes
    assert (teacher.host, teacher.backend) == ("intel", "cpu")
    assert [flags(each, "--gpu") for each in evaluators] == [[RADEON.id], [second.id]]
    assert [flags(each, "--runner") for each in evaluators] == [["evaluator-0"], ["evaluator-1"]]
    assert len({flags(each, "--watch")[0] for each in evaluators}) == 1
    on_cpu = job(**{"evaluation.processes": 2})
    plan = place_distillation([INTEL, LAMBDA], on_cpu, SETTING)
    assert [each.threads for each in plan.processes[2:]] == [4, 4]  # a quarter of the cores


@pytest.mark.parametrize(
    ("hosts", "settings", "message"),
    [
        ([replace(INTEL, share_folder=None), LAMBDA], {}, "host intel: .* motley_share_folder"),
        ([replace(INTEL, devices=None), LAMBDA], {}, "host intel: motley_devices is auto"),
        ([INTEL, LAMBDA], {"teacher.backend": "cuda"}, "host intel: the job asks for cuda"),
        ([LAMBDA], {"evaluation.backend": "wgpu"}, "host lambda: the job asks for wgpu"),
    ],
)
def test_what_does_not_fit_is_one_line(
    hosts: list[Host], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place_distillation(hosts, job(**settings), SETTING)


def test_absolute_paths_need_no_share() -> None:
    hosts = [replace(INTEL, share_folder=None), replace(LAMBDA, share_folder=None)]
    settings = {"logits": "/nfs/logits", "student.checkpoint.folder": "/nfs/checkpoints"}
    plan = place_distillation(hosts, job(**settings), SETTING)
    assert flags(named(plan, "teacher-0"), "--out") == ["/nfs/logits"]
    assert flags(named(plan, "evaluator-0"), "--watch") == ["/nfs/checkpoints"]


def test_a_resumed_job_is_the_same_job(tmp_path: Path) -> None:
    wanted = resolve_job(None, LEAST | {"student.training.batch_size": 8}, [HERE], tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(wanted.to_yaml())
    assert resolve_job(str(path), {}, [HERE], tmp_path / "elsewhere") == wanted


def test_nobody_evaluates_when_that_is_null(tmp_path: Path) -> None:
    wanted = resolve_job(None, LEAST | {"evaluation": None}, [INTEL, LAMBDA], tmp_path)
    plan = place_distillation([INTEL, LAMBDA], wanted, SETTING)
    assert list(who_is_where(plan)) == ["student", "teacher-0"]
    with pytest.raises(ConfigError, match="student: give model, or config"):
        resolve_job(
            None, {"teacher.model": "m", "teacher.data": ["d"], "student": None}, [INTEL], tmp_path
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"student.config": "albor-350m"}, "student: give model, or config for a new one"),
        ({"teacher.topk": 3}, "teacher.topk: unknown key .allowed: model, data"),
        ({"evaluation.backend": "tpu"}, "evaluation.backend: input should be 'cpu'"),
        (
            {"teacher.scheme": "sampled", "student.distillation.on_policy.prompts": "p.jsonl"},
            r"student\.distillation\.on_policy needs teacher\.scheme topk or full",
        ),
    ],
)
def test_a_wrong_job_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**settings)


def test_the_prompts_of_a_student_that_answers_are_on_its_host() -> None:
    own = {"student.distillation.on_policy.prompts": "inputs/prompts.jsonl"}
    given = job(**own, **{"student.distillation.on_policy.staleness": 4})
    plan = place_distillation([replace(HERE, share_folder=None)], given, SETTING)
    student = named(plan, "student")
    found = parse_assignments(flags(student, "--set"), "--set")
    config = run_config.load_config(
        "student", {**found, "model.path": "m", "data.train": "l", "output": "o"}
    )
    assert config.distillation is not None
    assert config.distillation.on_policy is not None
    assert config.distillation.on_policy.prompts == "/state/inputs/prompts.jsonl"
    assert config.distillation.on_policy.staleness == 4
    assert "/state/inputs/prompts.jsonl" in student.required_paths["validation"]


def test_corpora_of_the_hub_and_names_of_keys_reach_every_process() -> None:
    """A data set of the hub is no path of a host, and each reader gets its own names."""
    hub = "hf://datasets/owner/name/data"
    given = job(
        **{
            "teacher.data": [hub, "inputs/more"],
            "teacher.columns": {"text": "body"},
            "student.validation": hub,
            "student.columns": {"text": "own"},
            "evaluation.data": [hub],
            "evaluation.columns": {"prompt": "q", "completion": "a"},
        }
    )
    plan = place_distillation([replace(HERE, share_folder=None)], given, SETTING)
    teacher, student = named(plan, "teacher-0"), named(plan, "student")
    assert flags(teacher, "--data") == [hub, "/state/inputs/more"]
    assert flags(teacher, "--column") == ["text=body"]
    assert teacher.required_paths["data"] == (hub, "/state/inputs/more")
    assert {f"data.validation={hub}", "data.columns={text: own}"} <= set(flags(student, "--set"))
    evaluator = named(plan, "evaluator-0")
    assert flags(evaluator, "--data") == [hub]
    assert flags(evaluator, "--column") == ["prompt=q", "completion=a"]


def test_a_job_on_this_machine_alone_keeps_what_is_on_the_hub(tmp_path: Path) -> None:
    hub = "hf://datasets/owner/name"
    settings = {
        "teacher.data": [hub, "c"],
        "student.validation": hub,
        "evaluation.data": [hub],
    }
    found = resolve_job(None, LEAST | settings, [HERE], tmp_path)
    assert found.teacher.data == (hub, f"{tmp_path}/c")
    assert found.student.validation == hub
    assert found.evaluation is not None
    assert found.evaluation.data == (hub,)
