"""A model of 1.6 GB that trains, scores and answers in 0.7 GB, which the kernel enforces."""

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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {WORDS}"}) + "\n" for n in range(4)))
    return path


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    model = init_model(data, tmp_path_factory.mktemp("large") / "model", ModelSizes())
    tree = json.loads((model / "config.json").read_text()) | SIZES
    weights = write_model(model, tree, "F32") / "model.safetensors"
    assert 0.45 * weights.stat().st_size > LIMIT
    return model


SETTINGS = {
    "data.validation_fraction": 0.0,
    "data.max_seq_len": 256,
    "model.quantization": "none",
    "model.dtype": "float32",
    "lora.lora_rank": 4,
    "training.batch_size": 2,
}
COMMANDS = {
    "finetune": [
        *("finetune", "MODEL", "--data", "DATA", "--method", "lora", "--max-steps", "1"),
        *("--output", "OUT"),
        *(word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")),
    ],
    "teacher": [
        *("distill", "teacher", "MODEL", "--data", "DATA", "--out", "OUT", "--dtype", "float32"),
        *("--max-seq-len", "256", "--batch-tokens", "512"),
    ],
    "evaluate": ["evaluate", "MODEL", "--data", "DATA", "--max-seq-len", "256"],
    "generate": ["generate", "MODEL", "--prompt", "the quick", "--max-new-tokens", "3"],
}


@pytest.mark.parametrize("use", COMMANDS)
def test_a_model_larger_than_the_memory_of_its_process_is_used(
    large_model: Path, data: Path, tmp_path: Path, use: str
) -> None:
    with (large_model / "model.safetensors").open("rb") as file:  # its pages count where read
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    paths = {"MODEL": large_model, "DATA": data, "OUT": tmp_path / "out"}
    words = [str(paths.get(word, word)) for word in COMMANDS[use]]
    command = [sys.executable, "-m", "trainer.cli", *words, "--gpu-backend", "cpu"]
    log = tmp_path / "log"
    try:
        with limit_memory(LIMIT) as join, log.open("wb") as written:
            process = subprocess.run([*join, *command], stdout=written, stderr=written, check=False)
    except NoControlGroupError as error:
        pytest.skip(f"needs root for a control group: {error}")
    assert process.returncode == 0, log.read_text()
    assert " of 24 layers stay in memory" in log.read_text()
