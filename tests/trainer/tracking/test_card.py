"""The card at the end of a run: what it says, and that its commands can be run as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import forked
from tests.trainer.script_run import script_config
from tests.trainer.small_model import write_data, write_model
from tests.trainer.tiny_run import tiny_config, tiny_layout, tiny_progress, tiny_state
from trainer.checkpoint.store import CheckpointStore
from trainer.system.process.child import SAVING_VARIABLE
from trainer.tracking.card import describe_losses, make_card, mean_speed, sum_seconds
from trainer.tracking.status import read_status

BIN = Path(sys.executable).parent
TRAINER = (sys.executable, "-m", "trainer.cli")

TURNS = [
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
]


def event(kind: str, time: float = 0.0, **details: Any) -> dict[str, Any]:
    return {"kind": "event", "event": kind, "time": time, **details}


def step(number: int, time: float = 0.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time": time}


def test_nothing_was_lost() -> None:
    assert describe_losses([event("joined", rank=0), step(1), step(2), event("finished")]) == []


def test_workers_that_were_lost_and_what_made_up_for_them() -> None:
    records = [
        event("lost", rank=1),
        event("reassigned", rank=1, samples=9, ranks=[0]),
        event("rejoined", rank=1),
        event("lost", rank=1),
        event("reassigned", rank=1, samples=1000, ranks=[0, 2]),
        event("rejoined", rank=1),
        event("lost", rank=2),
        event("alarm", reason="disk full"),
    ]
    assert describe_losses(records) == [
        "worker 1 lost twice, back twice",
        "worker 2 lost once, never back",
        "1,009 samples of lost workers computed by others",
        "1 alarm, see metrics.jsonl",
    ]


def test_a_worker_that_leaves_a_stopped_run_is_not_lost() -> None:
    records = [event("stopping"), event("lost", rank=1), event("stopped")]
    assert describe_losses(records) == []
    again = [*records, event("resumed", step=3), event("lost", rank=0)]
    assert describe_losses(again) == [
        "worker 0 lost once, never back",
        "resumed once, 0 steps repeated",
    ]


def test_steps_after_the_last_checkpoint_are_computed_again() -> None:
    first = [step(number) for number in range(1, 8)]
    second = [event("resumed", step=4), step(5), step(6)]
    records = [*first, *second, event("resumed", step=6), step(7)]
    assert describe_losses(records) == ["resumed twice, 3 steps repeated"]


def test_the_time_in_which_nothing_ran_does_not_count() -> None:
    killed = [event("listening", 100.0), step(1, 103.0), event("resumed", 9000.0), step(2, 9004.0)]
    assert sum_seconds(killed) == 7.0
    stopped = [*killed, event("stopped", 9005.0), event("listening", 50000.0), step(3, 50002.0)]
    assert sum_seconds(stopped) == 10.0


def test_the_mean_speed_is_that_of_the_steps() -> None:
    fast, slow = {"tokens_per_second": 300.0}, {"tokens_per_second": 100.0}
    records = [event("listening", 0.0), step(1, 50.0) | fast, step(2, 51.0) | fast]
    assert mean_speed(records) == 300.0, "the start does not count"
    assert mean_speed([*records, step(3, 54.0) | slow]) == 150.0
    assert mean_speed([*records, event("resumed", 900.0), step(3, 901.0) | slow]) == 300.0
    assert mean_speed([step(1)]) is None


@pytest.mark.parametrize("supervised", [True, False])
def test_a_stopped_run_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    monkeypatch.delenv(SAVING_VARIABLE, raising=False)
    if supervised:
        monkeypatch.setenv(SAVING_VARIABLE, str(tmp_path / "saving"))
    monkeypatch.setattr(sys, "argv", ["trainer", "finetune", "my model", "-o", "out"])
    config = tiny_config(output=str(tmp_path))
    card = make_card(config, "r-1", stopped=True)
    command = card[card.index("stopped early; to continue:") + 1]
    wanted = "launch cluster up --resume r-1" if supervised else "finetune 'my model' -o out"
    assert command.startswith("  ")
    assert command.endswith(wanted)
    assert not [line for line in make_card(config, "r-1") if "to continue" in line]


def test_the_card_of_a_script_says_samples_and_names_a_script_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SAVING_VARIABLE, str(tmp_path / "saving"))
    fast = {"tokens_per_second": 300.0, "loss": 1.0}
    lines = (json.dumps(step(at, 10.0 + at) | fast) for at in (1, 2))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    card = make_card(script_config(tmp_path), "r-1", stopped=True)
    assert card[0].endswith(", 300 samples/s")
    assert card[-1] == "  launch cluster up --resume r-1 --script FILE"


def test_a_loss_that_is_not_finite_does_no_harm(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity; a card is never worth a run."""
    config = tiny_config(output=str(tmp_path))
    state, progress = tiny_state(2), tiny_progress(2)
    CheckpointStore(tmp_path / "checkpoints", tiny_layout(), config, Path("base")).save(
        state.take_snapshot(), progress, 0.5
    )
    lines = [{**step(2), "loss": None}, {"kind": "validation", "step": 2, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = make_card(config)
    assert card[0] == f"adapter: {tmp_path}/checkpoints/best (step 2)"
    assert not [line for line in card if "lost and recovered" in line], "nothing was"


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ({"text": "a"}, "--prompt"),
        ({"prompt": "a", "completion": "b"}, "--prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "--chat"),
        ({"instruction": "a", "output": "b"}, "--chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--prompt"),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:2], "rejected": TURNS[2:]}, "--chat"),
        (None, "--prompt"),
    ],
)
def test_a_model_is_asked_as_its_data_asks(
    tmp_path: Path, line: dict[str, Any] | None, asks: str
) -> None:
    data = tmp_path / "train.jsonl"
    if line:
        data.write_text(json.dumps(line) + "\n")
    task = "dpo" if line and "chosen" in line else "causal-lm"
    changes = {"output": str(tmp_path), "task": task, "num_classes": None}
    config = tiny_config(**changes, data={"train": str(data)})
    CheckpointStore(tmp_path / "checkpoints", tiny_layout(), config, Path("base")).save(
        tiny_state(2).take_snapshot(), tiny_progress(2), 0.5
    )
    assert any(f" generate {tmp_path} {asks} Hello" in command for command in make_card(config))


def train(folder: Path, data: Path, *words: str) -> tuple[list[str], str]:
    """Fine-tune two steps in a folder; return the card's lines and what stderr had."""
    model = write_model(folder / "my model", data)
    command = ["finetune", model.name, "--data", data.name, "-o", "out"]
    command += ["--batch-size", "4", "--max-steps", "2", "--gpu-backend", "cpu", "--threads", "1"]
    done = forked.run([*TRAINER, *command, *words], os.environ, folder=folder)
    assert done.returncode == 0, done.stderr
    card = read_status(folder / "out" / "status.json")["summary"]
    said = [line.partition(" ")[2] for line in done.stderr.splitlines()]  # behind the times
    assert said[-len(card) :] == card
    assert done.stdout == ""
    return card, done.stderr


def run_commands(card: list[str], folder: Path) -> list[str]:
    """Run what stands below `next:`, as a shell splits it, and return the outputs."""
    commands = card[card.index("next:") + 1 :]
    outputs: list[str] = []
    for command in commands:
        program, *words = shlex.split(command)
        assert shutil.which(program) == str(BIN / "trainer")
        done = forked.run([*TRAINER, *words], os.environ, folder=folder)
        assert done.returncode == 0, (command, done.stderr)
        outputs.append(done.stdout)
    return outputs


@pytest.mark.long
def test_a_language_model_is_evaluated_generates_and_is_merged(tmp_path: Path) -> None:
    data = write_data(tmp_path / "train.jsonl")
    data.write_text(re.sub(r', "label": \d', "", data.read_text()))
    shutil.copy(data, tmp_path / "held out.jsonl")
    words = ["--task", "causal-lm", "--method", "lora", "--validation", "held out.jsonl"]
    card, _ = train(tmp_path, data, *words)
    assert card[0].startswith("adapter: out/checkpoints/best (step 2, validation loss ")
    assert card[1].startswith("step 2, loss ")
    assert card[2:4] == [
        "to publish: out/adapter (with tokenizer and model card, without optimizer state)",
        "next:",
    ]
    program = BIN / "trainer"  # not on the path that the test has
    assert [line.split()[0] for line in card[4:]] == [str(program)] * 3
    evaluated, generated, merged = run_commands(card, tmp_path)
    assert "perplexity" in evaluated
    assert generated.strip()
    assert merged == f"{tmp_path}/out/merged\n"
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()


@pytest.mark.long
def test_what_was_held_out_is_what_is_evaluated(tmp_path: Path) -> None:
    data = write_data(tmp_path / "train.jsonl")
    words = ["--num-classes", "3", "--set", "data.validation_fraction=0.3"]
    card, _ = train(tmp_path, data, *words)
    command = f"  {BIN / 'trainer'} evaluate out --data train.jsonl --held-out"
    assert card[card.index("next:") + 1] == command
    (evaluated, *_) = run_commands(card, tmp_path)
    loss, accuracy = re.findall(r"(?:loss|accuracy) (\d\.\d+)", card[0])
    assert evaluated.startswith(f"loss {loss}, accuracy {accuracy[:-1]}"), "the run's own scores"
    assert " on 12 samples\n" in evaluated, "of 40"


@pytest.mark.long
def test_a_classifier_is_evaluated_and_a_full_model_needs_no_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    data = write_data(tmp_path / "train.jsonl")
    words = ["--method", "full", "--num-classes", "3", "--set", "data.validation_fraction=0"]
    card, _ = train(tmp_path, data, *words)
    assert card[0] == "model: out/checkpoints/latest (step 2)"
    assert card[-2:] == ["next:", "  trainer evaluate out --data train.jsonl"]
    (evaluated,) = run_commands(card, tmp_path)
    assert "rows are labels" in evaluated


@pytest.mark.long
def test_a_run_that_reads_layers_at_each_use_says_how_many_stay(tmp_path: Path) -> None:
    data = write_data(tmp_path / "train.jsonl")
    words = ["--method", "lora", "--num-classes", "3", "--set", "model.resident=1"]
    card, said = train(tmp_path, data, *words)
    residents = "1 of 2 layers resident, 1 streamed"
    assert f"worker 0 on cpu: {residents}" in card
    assert re.search(rf"replica on cpu.*, {residents}\n", said)
    assert "computed on" not in said, "that nothing failed is no warning"


@pytest.mark.long
def test_a_run_that_failed_has_none(tmp_path: Path) -> None:
    data = write_data(tmp_path / "train.jsonl")
    model = write_model(tmp_path / "model", data)
    weights = load_file(model / "model.safetensors")
    huge = {name: values * np.float32(1e30) for name, values in weights.items()}
    save_file(huge, model / "model.safetensors", {"format": "pt"})  # their squares overflow
    command = [*TRAINER, "finetune", str(model), "--data", str(data), "-o", "out"]
    command += ["--num-classes", "3", "--batch-size", "4", "--max-steps", "9", "--threads", "1"]
    command += ["--gpu-backend", "cpu", "--method", "full"]
    done = forked.run(command, os.environ, folder=tmp_path)
    assert done.returncode == 5, done.stderr
    assert read_status(tmp_path / "out" / "status.json")["summary"] == []
    assert "next:" not in done.stderr
