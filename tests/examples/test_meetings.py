"""From nothing to scored minutes, offline, by the commands of the example's page."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest

from tests import ROOT
from tests.project.command_blocks import command_block
from trainer.cli import trainer

SIZES = "--hidden-size 64 --layers 2 --heads 4 --kv-heads 2 --head-dim 16 --intermediate-size 128"
SETTINGS = {
    "model.path": "model",
    "model.dtype": "float32",
    "model.quantization": "none",
    "method": "full",
    "data.max_seq_len": 1024,
    "optimizer.learning_rate": 5e-3,
    "training.max_steps": 80,
    "training.batch_size": 2,
    "training.evaluate_every": 0,
    "checkpoint.every": 1000,
}
ON_CPU = ["--gpu-backend", "cpu", "--threads", "1"]
SHOWN = ["rouge_l", "action_items_found", "action_items_right"]


def call(*words: str) -> str:
    result = click.testing.CliRunner().invoke(trainer, list(words))
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


def script(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_model_that_knows_two_meetings_by_heart_writes_their_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    block = command_block("examples/meetings/README.md", "Meetings: from transcripts to minutes")
    generates, tunes, answers, scores = (shlex.split(line)[1:] for line in block.commands)
    script(*generates, "--count", "2", "--validation-count", "2")
    call(*f"init-model --data data/train.jsonl -o model {SIZES} --vocab-size 1024".split())
    settings = [word for pair in SETTINGS.items() for word in ("--set", "{}={}".format(*pair))]
    call(*tunes, *settings, *ON_CPU)
    # What it learned by heart, in place of meetings that two others say nothing about.
    learned = {"data/validation.jsonl": "data/train.jsonl", "512": "160"}
    *answers, redirected = (learned.get(word, word) for word in answers)
    Path(redirected.removeprefix(">")).write_text(call(*answers, *ON_CPU))
    lines = script(*(learned.get(word, word) for word in scores)).splitlines()
    found = {name: float(value) for name, value, *_ in map(str.split, lines)}
    assert list(found) == SHOWN
    assert found["rouge_l"] > 0.9
    assert found["action_items_found"] == found["action_items_right"] == 1.0
    corpus = script(generates[0], "-o", "ami", "--ami", str(Path(__file__).parent / "ami_sample"))
    assert corpus.endswith("ami: 1 train, 1 validation\n")
