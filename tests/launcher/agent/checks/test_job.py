"""What is found out about model, data, output and memory, on the host that is asked."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.agent.checks.digests import file_content
from launcher.agent.checks.finding import Finding
from launcher.agent.checks.job import (
    check_data,
    check_model,
    check_model_folder,
    check_output,
    check_text,
    check_training_data,
    model_content,
)
from launcher.agent.checks.memory import check_memory
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from tests.launcher.hollow_model import make_model
from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig, load_config
from trainer.model.layout import build_layout
from trainer.planning.workers import RunMemory
from trainer.replica.wgpu.planning import plan_memory

if TYPE_CHECKING:
    from tests.conftest import TinyModel

SETTING = PlanContext(run_id="x-1", trainer_command=("trainer",), state_folder="/s", routes={})


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"input": "a", "label": 1}\n', "ok"),
        (b'{"input": "' + b"a" * (2 << 20) + b'"}\n', "ok"),
        (b"", "fail"),
        (b"[1]\n", "fail"),
        (b"\xff\xfe\n", "fail"),
    ],
)
def test_data_files(tmp_path: Path, content: bytes, status: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    finding = check_data(tmp_path / "train.jsonl", "x")
    assert finding.status == status
    assert str(tmp_path) in finding.detail


def test_a_missing_data_file_and_a_missing_model(tmp_path: Path) -> None:
    finding = check_data(tmp_path / "absent", "--data FILE")
    assert "no such data file" in finding.detail
    assert finding.remedy == "give --data FILE"
    config = load_config("quickstart", {"model.path": str(tmp_path / "absent")})
    assert f"no model folder {tmp_path / 'absent'}" in check_model(config).detail
    (tmp_path / "config.json").write_text("{")
    broken = load_config("quickstart", {"model.path": str(tmp_path)})
    assert check_model(broken).status == "fail"


def training(path: Path, **settings: object) -> RunConfig:
    return load_config(
        None, {"task": "causal-lm", "model.path": "m", "data.train": str(path)} | settings
    )


def test_training_data_is_a_file_without_a_teacher_and_its_folder_with_one(tmp_path: Path) -> None:
    file, logits = tmp_path / "train.jsonl", tmp_path / "logits"
    file.write_text('{"text": "a"}\n')
    logits.mkdir()
    teacher = {"distillation.alpha": 0.7}
    assert check_training_data(training(file)).status == "ok"
    assert "contains no data files" in check_training_data(training(logits)).detail
    (logits / "dataset.json").write_text('{"shards": []}')
    assert check_training_data(training(logits, **teacher)).status == "ok"
    unsaid = check_training_data(training(logits))
    assert unsaid.status == "fail"
    assert "has no section `distillation`" in unsaid.detail
    assert unsaid.remedy.endswith("--set distillation.alpha=0.7")
    (logits / "dataset.json").write_text(
        '{"schema": "motley.answers/2", "shards": [{"number": 0}]}'
    )
    unfinished = check_training_data(training(logits))
    assert "1 of 1 shards are missing" in unfinished.detail, "answers are data as any other"
    unscored = check_training_data(training(logits, **teacher))
    assert unscored.status == "fail"
    assert "contains answers" in unscored.detail
    unfit = check_training_data(training(file, **teacher))
    assert unfit.status == "fail"
    assert "data.train is a folder of logits" in unfit.detail
    assert unfit.remedy == "give --data DIR, or --set distillation=null"


@pytest.mark.parametrize(
    ("task", "line", "problem"),
    [
        ("classify", {"prompt": "a", "completion": "b"}, "no line has a 'label', and task is clas"),
        ("classify", {"input": "a", "label": 7}, "t.jsonl:1: 'label' must be from 0 to 1, got 7"),
        ("classify", {"sms": "a", "label": 1}, "t.jsonl:1: lacks the key 'input' (or 'text')"),
        ("causal-lm", {"question": "a", "reply": "b"}, "t.jsonl:1: its keys ('question', 'reply')"),
    ],
)
def test_training_data_of_another_task_is_refused_before_the_start(
    tmp_path: Path, task: str, line: dict[str, object], problem: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(line) + "\n")
    classes = {"num_classes": 2} if task == "classify" else {}
    finding = check_training_data(training(path, task=task, **classes))
    assert finding.status == "fail"
    assert problem in finding.detail


def test_the_checkpoints_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    assert check_output(tmp_path, "run-2").status == "ok"
    (tmp_path / "status.json").write_text('{"run_id": "run-1"}')
    assert check_output(tmp_path, "run-2").status == "ok"  # it had saved nothing
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    finding = check_output(tmp_path, "run-2")
    assert finding.status == "fail"
    assert "--resume run-1" in finding.remedy
    assert check_output(tmp_path, "run-1").status == "ok"
    (tmp_path / "status.json").write_text("torn {")
    assert check_output(tmp_path, "run-2").status == "ok"  # the trainer judges by the manifests


def test_checkpoints_that_a_run_records_and_that_are_gone_are_named(tmp_path: Path) -> None:
    output, folder = tmp_path / "out", tmp_path / "checkpoints"
    output.mkdir()
    assert check_output(output, "run-1", folder).status == "ok"  # a new run
    events = [{"kind": "step", "step": 7}, {"event": "checkpoint", "step": 250}, {"step": 260}]
    (output / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    missing = check_output(output, "run-1", folder)
    assert missing.status == "fail"
    assert missing.detail.startswith(f"{folder}: is missing, though {output}/metrics.jsonl records")
    assert missing.detail.endswith("one of step 250")
    (folder / "step-000250").mkdir(parents=True)
    assert "contains no complete checkpoint" in check_output(output, "run-1", folder).detail
    (folder / "step-000250" / "manifest.json").write_text("{}")
    assert check_output(output, "run-1", folder).status == "ok"


def test_a_run_that_wgpu_does_not_compute_is_not_placed_on_it(
    tiny_model: TinyModel,
) -> None:
    card = Host(
        name="localhost",
        connection="local",
        devices=(Device("wgpu", "0000:03:00.0", "Radeon", 8 << 30),),
    )

    def check(model_type: str, **settings: bool) -> Finding:
        given = {"model.path": str(tiny_model(model_type))}
        named = {f"lora.{name}": value for name, value in settings.items()}
        config = load_config("quickstart", given | named)
        return check_memory(place_run([card], config, None, SETTING), config, ["localhost"])

    assert check("mistral").status == "ok"
    for finding, reason in (
        (check("gemma2"), "layers of gemma2 are computed by transformers'"),
        (check("mistral", use_dora=True), "lora.use_dora: wgpu does not scale the rows"),
    ):
        assert finding.status == "fail"
        assert f"computes with wgpu: {reason}" in finding.detail
        assert "motley_devices" in finding.remedy


def test_a_plan_above_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-HET-002: before anything is started, for the main memory and for a card."""
    config = load_config("quickstart", {"model.path": str(make_model(tmp_path))})
    assert check_model(config).status == "ok"
    host = Host(
        name="localhost",
        connection="local",
        devices=(Device("cuda", "GPU-1", "small", 1 << 30), Device("cpu", "cpu")),
    )
    monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda: 1 << 40)
    on_card = place_run([host], config, None, SETTING)
    assert check_memory(on_card, config, ["localhost"]).status == "ok", "it reads layers"
    whole = load_config("quickstart", {"model.path": config.model.path, "model.resident": "all"})
    finding = check_memory(on_card, whole, ["localhost"])
    assert finding.status == "fail"
    assert "worker-0 on GPU-1 need" in finding.detail
    cpu = Host(name="localhost", connection="local", devices=(Device("cpu", "cpu"),) * 3)
    plan = place_run([cpu], config, None, SETTING)
    assert check_memory(plan, config, ["localhost"]).status == "ok"
    monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda: 2 << 30)
    finding = check_memory(plan, config, ["localhost"])
    assert finding.status == "fail"
    assert "3 CPU workers and the coordinator need" in finding.detail


def test_workers_that_read_layers_at_each_use_need_no_room_for_all(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-HET-002: `model.resident: auto` keeps as many layers as fit, `all` refuses."""
    folder = tiny_model(num_hidden_layers=40)
    cpu = Host(name="localhost", connection="local", devices=(Device("cpu", "cpu"),))
    given = {"model.path": str(folder), "data.max_seq_len": 32, "lora.lora_rank": 1}
    for resident, status in (("all", "fail"), ("auto", "ok")):
        config = load_config("quickstart", given | {"model.resident": resident})
        needed = RunMemory.of_model_folder(folder, config).needed_bytes("cpu")
        free = int(needed / 0.9)
        monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda free=free: free)
        finding = check_memory(place_run([cpu], config, None, SETTING), config, ["localhost"])
        assert finding.status == status, finding.detail
        if status == "ok":
            said = r": (\d+) of 40 layers resident, (\d+) streamed in each CPU worker"
            found = re.search(said, finding.detail)
            assert found is not None, finding.detail
            assert int(found[1]) + int(found[2]) == 40 > int(found[1])
        else:
            assert finding.remedy == (
                "lower --expect-workers or data.max_seq_len, or set model.resident auto"
            )
    # Two layers and one sample are the least, and what then remains is said.
    monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda: 1 << 20)
    finding = check_memory(place_run([cpu], config, None, SETTING), config, ["localhost"])
    assert finding.status == "fail"
    assert "model.resident" not in finding.remedy


def test_launcher_and_worker_judge_a_vulkan_device_by_the_same_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-HET-002: what the launcher lets start there, the worker does not refuse."""
    folder = make_model(tmp_path)
    changes = {"model.path": str(folder), "model.resident": "all"}
    config = load_config("quickstart", changes)
    needed = plan_memory(folder, config, build_layout(folder, config), 1, recompute=True).total
    monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda: 1 << 40)
    for spare, status in ((1, "ok"), (-(1 << 20), "fail")):
        card = Device("wgpu", "0000:0b:00.0", "card", int(needed / 0.95) + spare)
        host = Host(name="localhost", connection="local", devices=(card,))
        plan = place_run([host], config, None, SETTING)
        finding = check_memory(plan, config, ["localhost"])
        assert finding.status == status, finding.detail
    assert f"need {needed / 2**30:.1f} GiB" in finding.detail


def test_each_host_answers_for_its_own_share_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        "quickstart", {"model.path": str(make_model(tmp_path)), "model.resident": "all"}
    )
    cpu = (Device("cpu", "cpu"),)
    head = Host(name="head", coordinator=True, bind_address="10.0.0.1", devices=cpu)
    plan = place_run([head, Host(name="big", devices=cpu * 3)], config, None, SETTING)
    monkeypatch.setattr("launcher.agent.checks.memory.available_memory", lambda: 6 << 30)
    assert check_memory(plan, config, ["head"]).status == "ok"
    assert "3 CPU workers need" in check_memory(plan, config, ["big"]).detail
    both = check_memory(plan, config, ["head", "big"]).detail  # two names of one machine
    assert "4 CPU workers and the coordinator need" in both


def test_the_content_of_a_model_is_config_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"lm_head.weight": tensor}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(8)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "additional_chat_templates").mkdir()
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in ("config.json", "tokenizer.json", "added_tokens.json", *templates, "README.md"):
        (folder / name).write_text("{}")
    config = load_config("quickstart", {"model.path": str(folder)})
    found = model_content(config, tmp_path)
    names = {"config.json", "model.safetensors", "tokenizer.json", "added_tokens.json"}
    assert set(found) == {*names, *templates}
    absent = load_config("quickstart", {"model.path": str(tmp_path / "absent")})
    assert model_content(absent, tmp_path) == {}


def test_a_gguf_file_is_a_model_and_a_damaged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the launcher-only install has none")
    from tests.trainer.gguf_files import write_gguf

    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl"))
    file = write_gguf(tmp_path / "small.gguf", model)
    config = load_config("quickstart", {"model.path": str(file)})
    finding = check_model(config)
    assert finding.status == "ok", finding
    assert f"{build_layout(model, config).size:,} trainable values" in finding.detail
    assert "model.safetensors" in model_content(config, tmp_path / "state")
    host = Host(name="localhost", connection="local", devices=(Device("cpu", "cpu"),))
    plan = place_run([host], config, None, SETTING)
    assert check_memory(plan, config, ["localhost"]).status == "ok"
    assert check_model_folder(file).status == "ok"
    damaged = load_config("quickstart", {"model.path": str(tmp_path / "damaged.gguf")})
    (tmp_path / "damaged.gguf").write_bytes(file.read_bytes()[:100])
    assert "damaged.gguf" in check_model(damaged).detail
    assert check_memory(plan, damaged, ["localhost"]).status == "warn"
    assert model_content(damaged, tmp_path / "state") == {}


def test_data_of_every_format_is_data(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,id\nhello,1\n")
    with gzip.open(tmp_path / "t.jsonl.gz", "wt") as file:
        file.write('{"text": "hello"}\n')
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "t.csv", tmp_path / "t.jsonl.gz", tmp_path):
        assert check_data(path, "--data FILE").status == "ok"
    assert "is a pipe" in check_data(tmp_path / "pipe", "--data FILE").detail
    content = file_content(str(tmp_path), str(tmp_path / "state"))
    assert sorted(content) == ["t.csv", "t.jsonl.gz"]


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl"])
def test_data_is_read_by_the_names_of_its_columns(tmp_path: Path, name: str) -> None:
    path, columns = tmp_path / name, {"text": "body"}
    if name == "t.parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"body": ["a"]}), path)
    else:
        path.write_text('{"body": "a"}\n' if name == "t.jsonl" else "body,id\na,1\n")
    assert check_training_data(training(path, **{"data.columns": columns})).status == "ok"
    lacking = check_data(path, "--data FILE", {"text": "txt"})
    assert "no key 'txt' (data.columns.text); it has 'body'" in lacking.detail


def test_data_of_the_hub_is_downloaded_by_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online nothing is downloaded for a check; offline the hub's cache has it or nothing has."""
    name = "hf://datasets/owner/name"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for finding in (check_data(Path(name), "--data FILE"), check_text(Path(name))):
        assert (finding.status, finding.remedy) == ("warn", "the trainer will download it")
    assert file_content(name, str(tmp_path)) == {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for finding in (check_data(Path(name), "--data FILE"), check_text(Path(name))):
        assert finding.status == "fail"
        assert "hf://datasets/owner/name: " in finding.detail
