"""Completion of both programs, as bash asks for it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.inventory.hosts import Host
from launcher.plan.placement import place
from launcher.plan.setting import Setting
from trainer.config.run import load

BIN = Path(sys.executable).parent
RUNS = ("first-20261121-130000-7f3a", "second-20261121-140000-7f3b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    host = Host(name="localhost", connection="local", fill_with_cpu=True, devices=())
    for run_id in RUNS:
        setting = Setting(run_id=run_id, trainer_command=("t",), state_folder="/s", routes={})
        plan = place([host], load("quickstart", {"output": str(tmp_path)}), 1, setting)
        kept = tmp_path / "state" / "runs" / run_id
        kept.mkdir(parents=True)
        (kept / "plan.json").write_bytes(plan.to_json())
    hosts = {"intel": {"ansible_host": "10.0.0.1"}, "lambda": {"ansible_host": "10.0.0.2"}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
    (tmp_path / "local.yml").write_text("all: {hosts: {here: {ansible_connection: local}}}")
    (tmp_path / "train.jsonl").touch()
    return tmp_path


@functools.cache
def script_of(program: str, shell: str) -> str:
    done = subprocess.run([BIN / program, "completion", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(line: str, folder: Path) -> list[str]:
    """Return what bash offers where the line ends; a word is behind its last blank."""
    words = line.split(" ")
    program = words[0]
    script = (
        f"{script_of(program, 'bash')}\n"
        'compopt() { printf "compopt %s %s" "$@"; echo; }\n'
        'COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))\n'
        f'_{program}_completion {program}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    environment = os.environ | {
        "MOTLEY_STATE_DIR": str(folder / "state"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    environment.pop("MOTLEY_INVENTORY", None)
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


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
            ["compopt -o nospace", "training.epochs=", "training.evaluate_every="],
        ),
        ("trainer distill student --config stud", ["compopt -o default", "student"]),
        ("launch sta", ["status"]),
        ("launch cluster up --preset quick", ["quickstart"]),
        ("launch cluster up --set lora.lora_r", ["compopt -o nospace", "lora.lora_rank="]),
        ("launch distill up --config albor", ["compopt -o default", "albor-350m"]),
        (
            "launch distill up --set evaluation.pro",
            ["compopt -o nospace", "evaluation.prompts=", "evaluation.problems="],
        ),
        ("launch status --run ", [RUNS[1], RUNS[0]]),
        ("launch cluster up --resume fir", [RUNS[0]]),
        ("launch cluster down --run s", [RUNS[1]]),
        ("launch logs work", ["worker-0"]),
        ("launch cluster up -i hosts.yml --limit ", ["intel", "lambda"]),
        ("launch sync checkpoints -i hosts.yml --from la", ["lambda"]),
        ("launch sync logits --from la", []),
        ("launch status -i local.yml --run fir", [RUNS[0]]),
        ("launch status -i absent.yml --run ", []),
    ],
)  # fmt: skip
def test_bash_is_offered(line: str, offered: list[str], folder: Path) -> None:
    assert [word for word in completed(line, folder) if word] == offered


@pytest.mark.parametrize("program", ["launch", "trainer"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(program: str, shell: str) -> None:
    assert f"_{program.upper()}_COMPLETE={shell}_complete" in script_of(program, shell)
