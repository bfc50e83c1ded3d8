"""What is wrong with data or model is said by the program before torch is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.covering import covering
from tests.trainer.small_model import write_data, write_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    write_model(folder / "model", write_data(folder / "good.jsonl"))
    return folder


def refused(home: Path, *words: object, role: str = "local") -> str:
    """Return the one line that `trainer finetune` ends with; nothing may be written."""
    before = sorted(home.rglob("*"))
    command = [sys.executable, "-m", "tests.trainer.torch_told", "finetune", *map(str, words)]
    classes = [] if "causal-lm" in words else ["--num-classes", "3"]
    command += [*classes, "--gpu-backend", "cpu", "-o", str(home / "out")]
    command += ["--role", role, "--bind", "127.0.0.1:0"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n"  # no torch
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("trainer: ")]
    assert sorted(home.rglob("*")) == before
    return line.removeprefix("trainer: ")


PROBLEMS = [
    (None, "data: contains no data files, whose names end in one of"),
    ("input,label\nls,3\n", "data:2: 'label' must be from 0 to 2, got 3"),
    ('{"input": "ls", "label": 3}\n', "data:1: 'label' must be from 0 to 2, got 3"),
]


@pytest.mark.parametrize(
    ("content", "problem", "role"),
    covering((*problem, role) for problem in PROBLEMS for role in ("local", "coordinator")),
)
def test_data(home: Path, tmp_path: Path, content: str | None, problem: str, role: str) -> None:
    data = tmp_path / "data"
    if content is None:
        data.mkdir()
    else:
        data.write_text(content)
    assert problem in refused(home, home / "model", "--data", data, role=role)
    good = home / "good.jsonl"
    words = (home / "model", "--data", good, "--validation", data)
    assert problem in refused(home, *words, role=role)


@pytest.mark.parametrize(
    ("role", "flag"),
    covering(product(["coordinator", "worker", "distributed"], ["--data", "--validation"])),
)
def test_a_pipe_that_several_processes_would_read(
    home: Path, tmp_path: Path, role: str, flag: str
) -> None:
    """Nothing writes to it: a process that opened it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    words: list[object] = [home / "model", "--data", home / "good.jsonl", flag, tmp_path / "pipe"]
    if role == "distributed":
        words += ["--distributed", "--world-size", 2, "--rank", 0, "--master", "127.0.0.1:1"]
    line = refused(home, *words, role="local" if role == "distributed" else role)
    assert line.startswith(f"{tmp_path / 'pipe'}: is a pipe, which only one process can read; ")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["adapter_config.json"], "model: is a LoRA adapter of base, not a model; merge it: "),
        (["config.json", "pytorch_model.bin"], "model: has its weights as .bin"),
        (["small.gguf"], "small.gguf: damaged or truncated GGUF file"),
        (["config.json"], "weights must be in safetensors format"),
    ],
)
def test_model(home: Path, tmp_path: Path, files: list[str], problem: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in files:
        (model / name).write_text(json.dumps({"base_model_name_or_path": "base"}))
    if "config.json" in files:
        shutil.copy(home / "model" / "config.json", model)
    assert problem in refused(home, model, "--data", home / "good.jsonl")


def test_a_conversation_that_the_chat_template_refuses(home: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(home / "model", model)
    (model / "chat_template.jinja").write_text(
        "{%- for m in messages %}{%- if m.role == 'tool' %}{{- raise_exception('No tools!') }}"
        "{%- endif %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    )
    good = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    bad = [{"role": "tool", "content": "x"}, *good]
    data = tmp_path / "data"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (good, bad)))
    words = (model, "--data", data, "--task", "causal-lm")
    assert refused(home, *words) == f"{data}:2: the chat template refuses it: No tools!"
