"""Ranks of `--distributed` that are started by hand, or as a document says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.cluster.real_process import Process
from tests.ports import free_port


class Hands:
    """Starts ranks by hand."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder, self.output = folder, folder / "out"
        self.model, self.data = model, data
        self.port = free_port()
        self.started: list[Process] = []

    def options(self, *more: str) -> list[str]:
        model, data = str(self.model), str(self.data)
        return [
            *("-m", "trainer", "finetune", "--distributed", model, "--data", data),
            *("--num-classes", "3", "-o", str(self.output), "--threads", "1", *more),
        ]

    def rank(self, number: int, *more: str, world: int = 2) -> Process:
        place = ["--world-size", str(world), "--rank", str(number)]
        command = self.options(*place, "--master", f"127.0.0.1:{self.port}", *more)
        name = f"rank-{number}-{len(self.started)}"
        environment = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        process = Process(name, [sys.executable, *command], self.folder, environment)
        self.started.append(process)
        return process

    @property
    def status(self) -> dict:
        file = self.output / "status.json"
        return json.loads(file.read_bytes()) if file.exists() else {"step": 0, "state": "none"}


def typed(hands: Hands, text: str, less: str) -> Process:
    """Run commands of a document beside a model and data, with more options."""
    (hands.folder / "model").symlink_to(hands.model)
    (hands.folder / "data.jsonl").symlink_to(hands.data)
    text = text.replace("--data data.jsonl", f"--data data.jsonl {less}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = ["bash", "-euc", f"cd {hands.folder}; {text}"]
    process = Process("torchrun", command, hands.folder, environment)
    hands.started.append(process)
    return process
