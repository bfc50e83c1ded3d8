"""A model of 1.6 GB that trains in 0.7 GB, which the kernel enforces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rig.control_group import NoControlGroupError, limit_memory
from benchmarks.rig.random_model import write_model
from trainer.init_model import ModelSizes, init_model

pytestmark = pytest.mark.long

LIMIT = 700_000_000
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "intermediate_size": 4096,
}
WORDS = "the quick brown fox jumps over the lazy dog and runs away from it " * 20


def test_a_model_larger_than_the_memory_of_its_process_trains(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} {WORDS}"}) + "\n" for n in range(4)))
    model = init_model(data, tmp_path / "model", ModelSizes())
    tree = json.loads((model / "config.json").read_text()) | SIZES
    weights = write_model(model, tree, "F32") / "model.safetensors"
    assert 0.45 * weights.stat().st_size > LIMIT
    with weights.open("rb") as file:  # its pages count where they are read
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    settings = {
        "data.validation_fraction": 0.0,
        "data.max_seq_len": 256,
        "model.quantization": "none",
        "model.dtype": "float32",
        "lora.lora_rank": 4,
        "training.batch_size": 2,
    }
    command = [sys.executable, "-m", "trainer.cli", "finetune", str(model), "--data", str(data)]
    command += ["--method", "lora", "--gpu-backend", "cpu", "--max-steps", "1"]
    command += ["--output", str(tmp_path / "run")]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    log = tmp_path / "log"
    try:
        with limit_memory(LIMIT) as join, log.open("wb") as written:
            process = subprocess.run([*join, *command], stdout=written, stderr=written, check=False)
    except NoControlGroupError as error:
        pytest.skip(f"needs root for a control group: {error}")
    assert process.returncode == 0, log.read_text()
    assert " of 24 layers stay in memory" in log.read_text()
