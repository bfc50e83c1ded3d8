"""What is wrong or unused in a run's data is said before its first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.trainer.data.families import r1
from tests.trainer.data.test_chat_template import ONE, turn, write_data
from tests.trainer.small_model import write_model
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.distill.teacher import teacher
from trainer.commands.evaluate import evaluate
from trainer.config.run import RunConfig, load_config
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.teacher.assignment import Assignment, ScoringRequest, assign_request
from trainer.run.composition import roles
from trainer.run.composition.roles import Placement
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError

ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)
CUT = [turn("user", "17+5?"), turn("assistant", "<think>Two more.</think>22")]
ACCEPTED = "data: the chat template leaves out text of 1 of 3 samples, which data.lost_text accepts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "seed.jsonl").write_text(json.dumps({"text": "user assistant"}) + "\n")
    model = write_model(folder / "model", folder / "seed.jsonl")
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": r1().plain, "bos_token": ""}))
    return model


def config(model: Path, folder: Path, **changes: Any) -> RunConfig:
    data = write_data(folder / "train.jsonl", (ONE, None), (CUT, None), (ONE, None))
    settings = {"task": "causal-lm", "model.path": str(model), "data.train": str(data)}
    more = {"output": str(folder / "output"), "training.max_steps": 1}
    return load_config(None, settings | more | changes)


def test_a_line_that_a_template_cuts_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.jsonl:2: .*'Two more\.'.*data\.lost_text") as one:
        read_inputs(config(model, tmp_path), "run", lambda _: None)
    assert "\n" not in str(one.value)


def test_where_it_is_accepted_it_is_counted_once(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    accepting = config(model, tmp_path, **{"data.lost_text": "accept"})
    read_inputs(accepting, "run", said.append)
    assert said.count(ACCEPTED) == 1
    assert accepting.agreement_digest() != config(model, tmp_path).agreement_digest()


def test_a_checkpoint_is_scored_as_it_was_trained(model: Path, tmp_path: Path) -> None:
    more = {"data.lost_text": "accept", "data.date": "2031-02-03"}
    assert roles.run_local(config(model, tmp_path, **more), "run", ALONE) == 0
    data = load_trained(tmp_path / "output").config.data
    assert (data.lost_text, data.date) == ("accept", "2031-02-03")


@pytest.mark.parametrize("command", [evaluate, teacher], ids=["evaluate", "teacher"])
def test_a_model_without_a_run_takes_an_option(
    command: click.Command, model: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "train.jsonl", (ONE, None), (CUT, None))
    words = [str(model), "--data", str(data), "--gpu-backend", "cpu", "--threads", "1"]
    words += ["--out", str(tmp_path / "logits")] if command is teacher else []
    run = click.testing.CliRunner().invoke
    assert "train.jsonl:2: " in str(refused := run(command, words).exception)
    assert "--lost-text accept" in str(refused)
    assert run(command, [*words, "--lost-text", "accept"], catch_exceptions=False).exit_code == 0


def test_keys_that_are_not_used_are_said(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    settings = config(model, tmp_path)
    path = tmp_path / "train.jsonl"
    path.write_text((json.dumps({"text": "hello there", "lable": 1}) + "\n") * 2)
    read_inputs(settings, "run", said.append)
    assert "data: keys of a data line that are not used: 'lable' (2 times)" in said


@pytest.mark.parametrize(("words", "year"), [([], "2024"), (["--date", "2031-02-03"], "2031")])
def test_a_teacher_takes_the_date(
    model: Path, tmp_path: Path, words: list[str], year: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = tmp_path / "dated"
    shutil.copytree(model, dated)
    source = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    (dated / "chat_template.jinja").write_text(source)
    data = write_data(tmp_path / "train.jsonl", (ONE, None))
    found: list[str] = []

    def note(request: ScoringRequest) -> Assignment:
        assignment = assign_request(request)
        (window,) = assignment.first_windows(100)
        found.append(load_tokenizer(dated).decode(window.tolist()))
        raise InputError("enough")

    monkeypatch.setattr("trainer.distill.teacher.assignment.assign_request", note)
    given = [str(dated), "--data", str(data), "--out", str(tmp_path / "logits"), *words]
    done = click.testing.CliRunner().invoke(teacher, given)
    assert "enough" in str(done.exception)
    assert found[0].startswith(year)
    bad = click.testing.CliRunner().invoke(teacher, [*given, "--date", "tomorrow"])
    assert (bad.exit_code, "does not match the format" in bad.output) == (2, True)
