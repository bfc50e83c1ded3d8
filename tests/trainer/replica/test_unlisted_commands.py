"""What is done with a listed family by commands is done with any other."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.replica.unlisted_models import write_tiny
from tests.trainer.small_model import write_data, write_model
from tests.waiting import PATIENCE, wait_for

TRAINER = (sys.executable, "-m", "trainer.cli")
KINDS = ("falcon", "mamba2", "olmoe", "cohere_compass_text", "lfm2_moe")
"""Plain attention, states, experts, sliding windows, convolutions."""


def run(*arguments: str, text: str = "") -> str:
    """Return what a command prints."""
    done = subprocess.run(
        [*TRAINER, *arguments], input=text, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("model_type", KINDS)
def test_a_run_resumes_and_its_output_generates_and_chats(tmp_path: Path, model_type: str) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"echo {n} # rm"}) + "\n" for n in range(60)))
    named = write_model(tmp_path / "named", write_data(tmp_path / "labels.jsonl"))
    model = write_tiny(tmp_path / "model", model_type)
    for file in named.glob("*token*"):
        shutil.copy(file, model)
    words = ["finetune", str(model), "--data", str(data), "--gpu-backend", "cpu", "--threads", "1"]
    words += ["--max-steps", "60", "--batch-size", "2", "--run-id", "one"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run(*words, "-o", str(whole))
    metrics = parted / "metrics.jsonl"
    with subprocess.Popen([*TRAINER, *words, "-o", str(parted)]) as process:
        wait_for(lambda: metrics.exists() and '"loss"' in metrics.read_text(), "a step")
        process.send_signal(signal.SIGTERM)
    status = json.loads((parted / "status.json").read_bytes())
    assert status["state"] == "stopped"
    run(*words, "-o", str(parted))
    status = json.loads((parted / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("completed", 60)
    for folder in (whole, parted):
        assert (folder / "adapter/adapter_model.safetensors").is_file()
    assert (whole / "adapter/adapter_model.safetensors").read_bytes() == (
        parted / "adapter/adapter_model.safetensors"
    ).read_bytes()
    asked = ("--prompt", "echo", "--max-new-tokens", "8", "--gpu-backend", "cpu")
    run("merge", str(parted), "-o", str(tmp_path / "merged"))
    texts = [run("generate", str(one), *asked) for one in (parted, tmp_path / "merged")]
    assert texts[0] == texts[1] != ""
    assert run("chat", str(parted), "--max-new-tokens", "4", "--gpu-backend", "cpu", text="echo\n")
