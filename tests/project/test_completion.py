"""Completion of both programs, as bash asks for it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher import cli as launch
from launcher.inventory.hosts import Host
from launcher.plan.placement import place_run
from launcher.plan.plan_context import PlanContext
from launcher.runs.records.queue_records import QueuedJob
from launcher.runs.records.stored_configs import StartArguments
from trainer import cli as trainer
from trainer.config.run import load_config

BIN = Path(sys.executable).parent
MAINS = {"launch": launch.main, "trainer": trainer.main}
RUNS = ("first-20261121-130000-7f3a", "second-20261121-140000-7f3b")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with two runs, two inventories and a data file."""
    host = Host(name="localhost", connection="local", fill_with_cpu=True, devices=())
    for run_id in RUNS:
        setting = PlanContext(run_id=run_id, trainer_command=("t",), state_folder="/s", routes={})
        plan = place_run([host], load_config("quickstart", {"output": str(tmp_path)}), 1, setting)
        kept = tmp_path / "state" / "runs" / run_id
        kept.mkdir(parents=True)
        (kept / "plan.json").write_text(json.dumps({**json.loads(plan.to_json()), "started": 1.0}))
    job = QueuedJob("coordinator", None, None, {}, "/", StartArguments(), None, "who", 1.0)
    (tmp_path / "state" / "queue").mkdir()
    (tmp_path / "state" / "queue" / "next-1.json").write_text(json.dumps(asdict(job)))
    hosts = {"intel": {"ansible_host": "10.0.0.1"}, "lambda": {"ansible_host": "10.0.0.2"}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
    (tmp_path / "local.yml").write_text("all: {hosts: {here: {ansible_connection: local}}}")
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MOTLEY_INVENTORY", raising=False)
    return tmp_path


def said_by(program: str, *arguments: str, **variables: str) -> str:
    """Return what a program prints, run here: its start is what it costs."""
    output = io.TextIOWrapper(io.BytesIO())
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [program, *arguments])
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            MAINS[program]()
    assert end.value.code in (None, 0)
    output.seek(0)
    return output.read()


def offered_by_bash(line: str, folder: Path, programs: Path) -> list[str]:
    """Return what bash offers where the line ends; a word is behind its last blank."""
    words = line.split(" ")
    program = words[0]
    script = (
        f"{said_by(program, 'completion', 'bash')}\n"
        'compopt() { printf "compopt %s %s" "$@"; echo; }\n'
        'COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))\n'
        f'_{program}_completion {program}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == ""
    return [word for word in done.stdout.splitlines() if word]


def asked_here(line: str, folder: Path) -> list[str]:
    """Return what bash offers if a stand-in gives it the answer that the program gives here."""
    words = line.split(" ")
    question = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    mode = {f"_{words[0].upper()}_COMPLETE": "bash_complete"}
    (folder / "answer").write_text(said_by(words[0], **question, **mode))
    stand_in = folder / "bin" / words[0]
    stand_in.parent.mkdir()
    names = " ".join(f'"${name}"' for name in (*question, *mode))
    stand_in.write_text(f"#!/bin/sh\nprintf '%s\\n' {names} >question\nexec cat answer\n")
    stand_in.chmod(0o755)
    offered = offered_by_bash(line, folder, stand_in.parent)
    asked = (folder / "question").read_text()
    assert asked == "".join(f"{value}\n" for value in (*question.values(), *mode.values()))
    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainer fine", ["finetune"]),
        ("trainer distill ins", ["inspect"]),
        ("trainer finetune --lea", ["--learning-rate"]),
        ("trainer finetune --method ", ["lora", "full"]),
        ("trainer finetune --config quick", ["compopt -o default", "quickstart"]),
        ("trainer finetune --data tra", ["compopt -o default"]),
        (
            "trainer finetune --set training.e",
            [
                "compopt -o nospace",
                "training.epochs=",
                "training.evaluate_every=",
                "training.early_stopping_patience=",
            ],
        ),
        ("trainer distill student --config stud", ["compopt -o default", "student"]),
        ("launch sta", ["status"]),
        ("launch cluster up --preset quick", ["quickstart"]),
        ("launch cluster up --set lora.lora_r", ["compopt -o nospace", "lora.lora_rank="]),
        ("launch distill up --config albor", ["compopt -o default", "albor-350m"]),
        (
            "launch distill up --set evaluation.pro",
            [
                "compopt -o nospace",
                "evaluation.prompts=",
                "evaluation.problems=",
                "evaluation.processes=",
            ],
        ),
        ("launch status --run ", [RUNS[1], RUNS[0]]),
        ("launch cluster up --resume fir", [RUNS[0]]),
        ("launch cluster down --run s", [RUNS[1]]),
        ("launch logs work", ["worker-0"]),
        ("launch queue r", ["remove", "run"]),
        ("launch queue remove ", ["next-1"]),
        ("launch cluster up -i hosts.yml --limit ", ["intel", "lambda"]),
        ("launch sync checkpoints -i hosts.yml --from la", ["lambda"]),
        ("launch sync logits --from la", []),
        ("launch status -i local.yml --run fir", [RUNS[0]]),
        ("launch status -i hosts.yml --run fir", [RUNS[0]]),  # no host of it answers
    ],
)
def test_bash_is_offered(line: str, offered: list[str], folder: Path) -> None:
    assert asked_here(line, folder) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainer finetune --set training.e", "training.epochs="),
        ("launch cluster down --run s", RUNS[1]),
    ],
)
def test_the_programs_themselves_answer_bash(line: str, offered: str, folder: Path) -> None:
    assert offered in offered_by_bash(line, folder, BIN)


@pytest.mark.parametrize("program", ["launch", "trainer"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(program: str, shell: str) -> None:
    assert f"_{program.upper()}_COMPLETE={shell}_complete" in said_by(program, "completion", shell)
