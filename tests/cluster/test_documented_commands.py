"""What README and demo have a reader type on one machine: the same commands on less data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.project.command_blocks import CommandBlock, command_block
from tests.trainer.small_model import SIZES
from trainer.config.run import load_config
from trainer.data.corpus import write_shell_safety
from trainer.init_model import init_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


class Reader:
    """Types what a document says, in a folder and on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MOTLEY_STATE_DIR": str(folder / "state"),
            "NO_COLOR": "1",
        }

    def prepare(self, count: int) -> None:
        """Make data and a model, as a reader may have them."""
        write_shell_safety(self.folder / "data", count, 10, 0)
        sizes = replace(SIZES, vocab_size=1024)  # few tokens of a small model
        init_model(self.folder / "data" / "train.jsonl", self.folder / "model", sizes, 0)

    def type(self, block: CommandBlock, added: Mapping[str, str]) -> str:
        """Run a block of commands, some with further options; return what they print."""
        text = block.text
        for command, options in added.items():
            assert text.count(command) == 1, command
            text = text.replace(command, f"{command} {options}")
        done = self.run(text)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euxc", text],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=800,
        )


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.run("launch cluster down --all")


@pytest.mark.long
def test_the_demo_by_hand(reader: Reader) -> None:
    reader.type(
        command_block("docs/demo.md", "Make data and a model by hand"),
        {
            "-o demo/data": "--count 256 --validation-count 64",
            "--config pretrain": "--set training.max_steps=2 --set training.batch_size=8",
        },
    )
    printed = reader.type(
        command_block("docs/demo.md", "Fine-tune it by hand"),
        {"--preset quickstart": f"--set training.max_steps=6 -e motley_port={reader.port}"},
    )
    assert "completed, step 6/6" in printed
    assert "nothing was running" in printed
    assert json.loads(printed.splitlines()[-1])["schema"] == "motley.scores/1"


@pytest.mark.long
def test_a_readers_own_data_and_model(reader: Reader) -> None:
    reader.prepare(48)
    printed = reader.type(
        command_block("README.md", "Your own data and model"),
        {"training.epochs=3": f"--wait -e motley_port={reader.port}"},
    )
    assert re.search(r"completed, step (\d+)/\1\b.*validation accuracy", printed), printed


@pytest.mark.long
def test_a_model_and_data_alone(reader: Reader) -> None:
    """`launch cluster up --model M --data D` to its end, and `trainer` takes its run.yaml."""
    reader.prepare(120)
    up = f"launch cluster up --expect-workers 2 -e motley_port={reader.port} --wait"
    done = reader.run(f"{up} --model model --data data/train.jsonl --set training.epochs=1")
    assert done.returncode == 0, done.stderr
    file = reader.folder / "runs/output/run.yaml"
    assert f"settings by data and model, all of them in {file}:" in done.stderr
    kept = load_config(file)
    assert (kept.task, kept.num_classes, kept.data.validation_fraction) == ("classify", 5, 0.1)
    assert (kept.training.epochs, kept.training.max_steps) == (1, None)
    status = json.loads((file.parent / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("completed", 14)  # of 108 samples, 8 in each
    assert 0 <= status["validation"]["accuracy"] <= 1

    again = f"trainer finetune --config {file} -o again --gpu-backend cpu --threads 1"
    assert reader.run(again).returncode == 0
    one = json.loads((reader.folder / "again/status.json").read_bytes())
    assert one["validation"]["loss"] == pytest.approx(status["validation"]["loss"], rel=0.05)


@pytest.mark.long
def test_the_lab(reader: Reader) -> None:
    fewer: dict[str, str] = dict.fromkeys(
        ("precision --steps 5", "checkpointing --steps 5"), "--steps 2"
    )
    printed = reader.type(command_block("docs/commands.md", "trainer lab"), fewer)
    assert re.search(r"top-k, fp32 and 32-bit indices +100 +90.0 % +800 +5 +0.6573", printed)
    assert re.search(r"ZeRO-1 .* 38.5 ", printed)
    for title in ("error feedback:", "mixed precision:", "gradient checkpointing:"):
        assert title in printed
