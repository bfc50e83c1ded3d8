"""The config of a run that goes on: this machine's own, else one that can do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import run
from launcher.commands.options import config_order
from launcher.errors import ConfigError
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from launcher.runs.records.registry import Registry
from launcher.runs.records.stored_configs import StartArguments, read_run_config, store_config
from tests.launcher.played_hosts import Disk
from trainer.config.run import RunConfig, load_config

RUN_ID = "demo-20261120-110300-7f3a"
HOSTS = (Host(name="intel", coordinator=True), Host(name="big", share_folder="/net/share"))
SAFE: dict[str, Any] = {
    "output": "/var/lib/motley/runs/output",
    "model": {"path": "/var/lib/motley/inputs/qwen"},
    "data": {"train": "/net/share/data/train.jsonl", "validation": None},
    "checkpoint": {"folder": "/srv/motley/checkpoints/x"},
}
JOB: dict[str, Any] = {
    "logits": "distill",
    "teacher": {"model": "inputs/teacher", "data": ["inputs/a.jsonl", "/srv/motley/b"]},
    "student": {"model": "inputs/student", "output": "outputs/distill"},
    "evaluation": {"tasks": ["loss", "lm-eval:arc_easy"], "data": ["inputs/c.jsonl"]},
}


@pytest.fixture
def registry(
    tmp_path: Path, silent_hosts: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """Return the runs of a cluster whose coordinator's host is another machine."""
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "laptop"))
    monkeypatch.setattr("launcher.hosts.ssh.connect_host", lambda host: Disk(tmp_path / host.name))
    listed = [Host(name="intel", coordinator=True, devices=(), fill_with_cpu=True)]
    setting = PlanContext(run_id=RUN_ID, trainer_command=("t",), state_folder="/s", routes={})
    plan = place_run(listed, load_config("quickstart", {"output": "/o"}), 1, setting)
    folder = tmp_path / "intel" / "runs" / RUN_ID
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({**json.loads(plan.to_json()), "started": 1.0}))
    return Registry.for_hosts(HOSTS)


def say(tmp_path: Path, tree: object) -> bytes:
    text = yaml.safe_dump(tree).encode()
    (tmp_path / "intel" / "runs" / RUN_ID / "run.yaml").write_bytes(text)
    return text


HUB = "hf://datasets/owner/name@main/data"


@pytest.mark.parametrize(
    "tree",
    [
        SAFE,
        JOB,
        {**SAFE, "model": {"path": "Qwen/Qwen3-0.6B"}},
        {**SAFE, "data": {"train": HUB, "validation": HUB}},
        {**JOB, "teacher": {"model": "inputs/teacher", "data": [HUB]}},
    ],
)
def test_what_lies_where_motley_keeps_things_is_taken(
    tmp_path: Path, registry: Registry, tree: dict[str, Any]
) -> None:
    text = say(tmp_path, tree)
    assert read_run_config(registry, RUN_ID, ()) == (text, [])


HOSTILE = [
    ("output", "/home/you/.ssh"),
    ("output", "/var/lib/motley/../../etc"),
    ("output", "/var/lib/motley"),
    ("output", "/var/lib/motley/ca"),
    ("output", "/var/lib/motley/runs/other/processes/worker-0"),
    ("output", "relative"),
    ("output", "--flag"),
    ("output", "/srv/motley/a\nb"),
    ("output", 7),
    ("model.path", "/root/models"),
    ("model.path", "../../x"),
    ("data.train", "/etc/shadow"),
    ("data.train", "hf://models/owner/name"),
    ("output", "hf://datasets/owner/name"),
    ("data.validation", "/proc/self/environ"),
    ("data.train", "hf://datasets/owner/name/../.."),
    ("data.validation", "hf://datasets/owner/.."),
    ("checkpoint.folder", "/"),
    ("model.adapter", "/root/adapter"),
    ("training.sample_prompts", "/etc/shadow"),
    ("distillation.on_policy.prompts", "/etc/shadow"),
]
HOSTILE_JOB = [
    ("logits", "/tmp"),
    ("logits", "../x"),
    ("teacher.model", "-rf"),
    ("teacher.data", ["inputs/a", "/etc/passwd"]),
    ("student.output", "ca"),
    ("student.output", "runs/other"),
    ("student.checkpoint.folder", "/etc"),
    ("student.config", "/etc/x.json"),
    ("student.training.sample_prompts", "/etc/shadow"),
    ("student.distillation.on_policy.prompts", "../x"),
    ("teacher.data", ["hf://datasets/owner/name/x/../../.."]),
    ("evaluation.problems", "/etc/x"),
    ("evaluation.run_code", True),
    ("evaluation.run_code", "yes"),
    ("evaluation.tasks", ["lm-eval:/tmp/task.yaml"]),
]


@pytest.mark.parametrize(
    ("tree", "key", "value"),
    [*((SAFE, *case) for case in HOSTILE), *((JOB, *case) for case in HOSTILE_JOB)],
)
def test_anything_else_has_to_be_given_by_the_operator(
    tmp_path: Path, registry: Registry, tree: dict[str, Any], key: str, value: object
) -> None:
    changed = yaml.safe_load(yaml.safe_dump(tree))
    *parents, leaf = key.split(".")
    section = changed
    for parent in parents:
        section = section.setdefault(parent, {})
    section[leaf] = value
    text = say(tmp_path, changed)
    with pytest.raises(ConfigError, match=rf"(?s)was not started from this machine.* {key} .*--"):
        read_run_config(registry, RUN_ID, ())
    assert read_run_config(registry, RUN_ID, {key}) == (text, [])


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("tree", [SAFE, JOB])
def test_a_stored_command_is_dropped_by_name(
    tmp_path: Path, registry: Registry, tree: dict[str, Any], is_own: bool
) -> None:
    text = say(tmp_path, {**tree, "notify": ["touch", "/tmp/x"]})
    if is_own:
        store_config(RUN_ID, text, StartArguments())
    config, remarks = read_run_config(registry, RUN_ID, ())
    assert yaml.safe_load(config) == tree
    assert remarks == [f"the notify of {RUN_ID} is not used; give your own: --notify COMMAND"]


@pytest.mark.parametrize("text", [b"[1]", b"{", b"- &a [*a]", b"\xff", b"!!python/object:x {}"])
def test_what_is_no_config(tmp_path: Path, registry: Registry, text: bytes) -> None:
    (tmp_path / "intel" / "runs" / RUN_ID / "run.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"its run\.yaml is not a config"):
        read_run_config(registry, RUN_ID, ())


def test_the_machine_that_started_it_goes_by_its_own_copy(
    tmp_path: Path, registry: Registry
) -> None:
    own = say(tmp_path, {**SAFE, "data": {"train": "/home/you/train.jsonl"}})
    store_config(RUN_ID, own, StartArguments())
    assert (tmp_path / "laptop" / "configs" / f"{RUN_ID}.yaml").stat().st_mode & 0o777 == 0o600
    assert read_run_config(registry, RUN_ID, ()) == (own, [])
    say(tmp_path, {**SAFE, "data": {"train": "/etc/shadow"}})
    config, warning = read_run_config(registry, RUN_ID, ())
    assert config == own
    assert warning == [f"the hosts' config of {RUN_ID} differs and is not used"]


def test_runs_of_this_machine_alone_need_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    text = say(tmp_path, {"output": "/anywhere"})
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "intel"))
    assert read_run_config(Registry.for_this_user(), RUN_ID, ()) == (text, [])


def test_a_setting_counts_whether_it_has_a_flag_of_its_own_or_not(tmp_path: Path) -> None:
    """Else one that is given by --set would let the host's value through."""
    settings = (f"data.train={tmp_path}/mine", "output=/out")
    order = config_order(None, None, settings, str(tmp_path / "m"), None, None)
    made = order.resolve_job([Host(name="here", connection="local")])
    assert isinstance(made, RunConfig)
    assert (made.data.train, made.output) == (f"{tmp_path}/mine", "/out")


def test_the_command_refuses_in_one_line(
    tmp_path: Path,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(tmp_path, {**SAFE, "data": {"train": "/etc/shadow"}})
    monkeypatch.setattr("launcher.runs.cluster.load_inventory", lambda *_, **__: HOSTS)
    assert run(["cluster", "up", "--resume", RUN_ID]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "data.train /etc/shadow, which is not a path of Motley's there" in error
