"""What takes long is announced, and what is quick is not."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.small_model import SIZES, write_data, write_model
from trainer.init_model import init_model
from trainer.system.process import slow_log
from trainer.system.process.slow_log import log_if_slow

IMPATIENT = """
import sys
from trainer.system.process import slow_log
class Due:
    def __init__(self, seconds, call, arguments):
        self.start = lambda: call(*arguments)
    def cancel(self): pass
    join = cancel
slow_log.threading.Timer = Due
from trainer.cli import main
sys.argv = ["trainer", *sys.argv[1:]]
main()
"""
"""Every announcement is due at once, as on a very slow machine."""


def test_a_block_that_is_quick_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with log_if_slow("hashing"):
        pass
    assert caplog.messages == []


def test_a_block_that_is_slow_says_so_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(slow_log, "PATIENCE", 0.0)
    before = threading.active_count()
    with log_if_slow("hashing model"):
        wait_for_line(caplog)
    assert caplog.messages == ["hashing model ..."]
    assert threading.active_count() == before


def wait_for_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3000):
        if caplog.messages:
            return
        threading.Event().wait(0.01)


def test_an_error_passes_through() -> None:
    with pytest.raises(ValueError, match="no"), log_if_slow("loading"):
        raise ValueError("no")


def run(folder: Path, *words: str, backend: str = "cpu") -> subprocess.CompletedProcess[str]:
    """Run the trainer in a folder where every announcement is due at once."""
    command = [sys.executable, "-P", "-c", IMPATIENT, *words, "--gpu-backend", backend]
    command += ["--threads", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_a_slow_machine_is_told_what_it_waits_for_and_data_stays_data(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl")).resolve()
    words = ["--data", "train.jsonl", "--num-classes", "3", "--batch-size", "4"]
    said = run(tmp_path, "finetune", "model", *words, "-o", "out", "--max-steps", "1").stderr
    for line in ("reading train.jsonl", f"hashing {model}", "importing torch", f"loading {model}"):
        assert f"{line} ...\n" in said
    assert "\r" not in said
    scores = run(tmp_path, "evaluate", "out", "--data", "train.jsonl", "--json")
    assert scores.stdout.startswith('{"schema": "motley.scores/1"')
    assert "importing torch ...\n" in scores.stderr


@pytest.mark.long
@pytest.mark.usefixtures("vulkan")
def test_a_slow_gpu_is_compiled_for_and_weights_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))  # with no weights of other tests
    wide = replace(SIZES, hidden_size=64, head_dim=16)
    model = init_model(write_data(tmp_path / "train.jsonl"), tmp_path / "model", wide, 0).resolve()
    words = ["--data", "train.jsonl", "--num-classes", "3", "--batch-size", "4"]
    words += ["-o", "out", "--max-steps", "1", "--set", "model.quantization=nf4"]
    said = run(tmp_path, "finetune", "model", *words, backend="wgpu").stderr
    weights = f"reading the quantised weights of {model} ...\n"
    for line in ("compiling kernels for ", "compiling a kernel ...\n", weights):
        assert line in said
