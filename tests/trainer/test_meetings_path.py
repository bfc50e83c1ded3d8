"""From nothing to scored minutes, offline: generate, make a model, fine-tune, evaluate."""

from __future__ import annotations

import shlex
from pathlib import Path

import click.testing
import pytest

from tests.project.command_blocks import command_block
from trainer.cli import trainer
from trainer.evaluate.results import read_evaluations

SIZES = "--hidden-size 64 --layers 2 --heads 4 --kv-heads 2 --head-dim 16 --intermediate-size 128"
# fmt: off
SETTINGS = {
    "model.path": "model", "model.dtype": "float32", "model.quantization": "none", "method": "full",
    "data.max_seq_len": 1024, "optimizer.learning_rate": 5e-3, "training.max_steps": 80,
    "training.batch_size": 2, "training.evaluate_every": 0, "checkpoint.every": 1000,
}
# fmt: on
ON_CPU = "--gpu-backend cpu --threads 1"
ADDED = {
    "generate-data": "--count 2 --validation-count 2",
    "finetune": " ".join(f"--set {key}={value}" for key, value in SETTINGS.items()) + f" {ON_CPU}",
    # What it learns by heart, in place of meetings that two others say nothing about.
    "evaluate": f"--data data/train.jsonl --max-new-tokens 160 {ON_CPU}",
}


def run(line: str) -> None:
    result = click.testing.CliRunner().invoke(trainer, shlex.split(line)[1:])
    assert result.exit_code == 0, (line, result.output, result.exception)


@pytest.mark.long
def test_a_model_that_knows_two_meetings_by_heart_writes_their_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document's commands, on less data and a small model."""
    monkeypatch.chdir(tmp_path)
    for line in command_block("docs/meetings.md", "Training and the score").commands:
        command = line.split()[1]
        if command == "evaluate":
            line = line.replace("--data data/validation.jsonl --max-new-tokens 512", "")
        if command == "finetune":
            run(f"trainer init-model --data data/train.jsonl -o model {SIZES} --vocab-size 1024")
        run(f"{line} {ADDED[command]}")
    output = tmp_path / "runs" / "meeting-summaries"
    (record,) = read_evaluations(output / "evaluations" / "evaluations.jsonl")
    found = record["tasks"]["summaries"]["figures"]
    assert found["rouge_l"] > 0.9
    assert found["action_items_found"] == found["action_items_right"] == 1.0
    assert record["rated_by"] == "summaries/rouge_l"
