"""`launch` on this machine with a stand-in for the trainer: what it starts comes up at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.session.processes import find_run
from tests import ROOT
from tests.forked import Program, run
from tests.ports import free_port

STAND_IN = ROOT / "tests" / "launcher" / "stand_in_trainer.py"
LAUNCH = [sys.executable, "-m", "launcher.cli"]


class Cluster:
    """A state folder, a model, data and an inventory of its own; and the `launch` command."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.output.mkdir()
        self.state = folder / "state"
        self.data = folder / "train.jsonl"
        self.data.write_text('{"input": "ls", "label": 0}\n')
        self.port = free_port()
        self.inventory = folder / "hosts.yml"
        self.inventory.write_text(
            json.dumps(
                {
                    "all": {
                        "hosts": {
                            "localhost": {
                                "ansible_connection": "local",
                                "motley_devices": [{"backend": "cpu"}],
                                "motley_fill_with_cpu": True,
                                "motley_port": self.port,
                                "motley_trainer_command": [sys.executable, str(STAND_IN)],
                            }
                        }
                    }
                }
            )
        )
        self.environment = os.environ | {
            "MOTLEY_STATE_DIR": str(self.state),
            "NO_COLOR": "1",
            "COLUMNS": "250",
        }
        self.config = [
            *("--set", "data.validation=null", "--model", str(model)),
            *("--data", str(self.data), "--output", str(self.output)),
        ]
        self.behave()

    def behave(self, **behaviour: object) -> None:
        text = json.dumps({name.replace("_", "-"): how for name, how in behaviour.items()})
        (self.output / "behaviour.json").write_text(text)

    def up_command(self, *flags: str, workers: int = 2) -> list[str]:
        options = ["--inventory", str(self.inventory), *self.config, "-n", str(workers)]
        if "--resume" not in flags:  # which brings its own config
            options += ["--preset", "quickstart"]
        return [*LAUNCH, "cluster", "up", *options, *flags]

    def up(self, *flags: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
        return run(self.up_command(*flags, workers=workers), self.environment)

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([*LAUNCH, *arguments], self.environment)

    def open(self, command: list[str]) -> Program:
        return Program(command, self.environment)

    def status(self) -> dict[str, Any]:
        return json.loads(self.launch("status", "--json").stdout)

    @property
    def training(self) -> dict[str, Any]:
        """What a real trainer says of itself: a look that, unlike `status`, starts no command."""
        file = self.output / "status.json"
        return json.loads(file.read_bytes()) if file.exists() else {"step": 0, "state": "none"}

    def runs(self) -> list[str]:
        return [path.parent.name for path in self.state.glob("runs/*/plan.json")]

    def living(self) -> list[Any]:
        return [process for run_id in self.runs() for process in find_run(run_id)]


@pytest.fixture
def cluster(tmp_path: Path, small_model: Path) -> Iterator[Cluster]:
    result = Cluster(tmp_path, small_model)
    yield result
    result.launch("cluster", "down", "--all")
    assert result.living() == []
