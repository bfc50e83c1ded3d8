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
    model = make_model(tmp_path_factory.mktemp("large"), data, SIZES)
    assert 0.45 * (model / "model.safetensors").stat().st_size > LIMIT
    return model


def make_model(folder: Path, data: Path, sizes: dict[str, int]) -> Path:
    model = init_model(data, folder / "model", ModelSizes())
    tree = json.loads((model / "config.json").read_text()) | sizes
    return write_model(model, tree, "F32")


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
    paths = {"MODEL": large_model, "DATA": data, "OUT": tmp_path / "out"}
    assert " of 24 layers stay in memory" in run_within(LIMIT, use, paths, tmp_path / "log")


@pytest.mark.parametrize(("use", "limit"), [("finetune", 1_000_000_000), ("generate", 850_000_000)])
def test_a_head_that_leaves_no_memory_for_the_rest_is_read_in_chunks(
    data: Path, tmp_path: Path, use: str, limit: int
) -> None:
    """622 MB of it, which interpreter, torch, logits and two layers need, too."""
    sizes = SIZES | {"num_hidden_layers": 4, "intermediate_size": 2048, "vocab_size": 151_936}
    paths = {"MODEL": make_model(tmp_path, data, sizes), "DATA": data, "OUT": tmp_path / "out"}
    log = run_within(limit, use, paths, tmp_path / "log")
    assert "0 of 4 layers stay in memory" in log
    assert "at each use, and so is the head" in log


def run_within(limit: int, use: str, paths: dict[str, Path], log: Path) -> str:
    """Return what a command logs that has so many bytes."""
    with (paths["MODEL"] / "model.safetensors").open("rb") as file:  # its pages count where read
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = [str(paths.get(word, word)) for word in COMMANDS[use]]
    command = [sys.executable, "-m", "trainer.cli", *words, "--gpu-backend", "cpu"]
    try:
        with limit_memory(limit) as join, log.open("wb") as written:
            process = subprocess.run([*join, *command], stdout=written, stderr=written, check=False)
    except NoControlGroupError as error:
        pytest.skip(f"needs root for a control group: {error}")
    assert process.returncode == 0, log.read_text()
    return log.read_text()
