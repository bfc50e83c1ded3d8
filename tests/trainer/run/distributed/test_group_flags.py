"""Devices that no replica group can have are refused in one line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from trainer.commands.finetune import finetune
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0,1"], "with --strategy the GPUs of a worker share one replica"),
        (["--gpus", "0", "--strategy", "ddp"], "needs two or more different devices"),
        (["--strategy", "ddp"], "not none"),
        (["--gpus", "1,1", "--strategy", "ddp"], "needs two or more different devices"),
        (
            ["--gpus", "0,1", "--strategy", "ddp", "--gpu-backend", "wgpu"],
            "--gpu-backend wgpu: --strategy ddp runs on cuda or cpu",
        ),
        (["--gpus", "0,1", "--strategy", "ddp", "--role", "local"], "is for --role worker"),
        (["--gpus", "0,1", "--strategy", "ddp", "--role", "coordinator"], "is for --role worker"),
    ],
)
def test_refused(flags: list[str], message: str) -> None:
    role = [] if "--role" in flags else ["--role", "worker"]
    arguments = ["model", "--data", "data.jsonl", "--num-classes", "2", *role, *flags]
    error = CliRunner().invoke(finetune, arguments).exception
    assert isinstance(error, InputError)
    assert message in str(error)
    assert "\n" not in str(error)
