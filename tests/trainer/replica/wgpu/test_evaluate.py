"""`trainer evaluate --gpu-backend wgpu` on a model folder, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest

from tests.trainer import small_model as small
from trainer.commands.evaluate import evaluate
from trainer.replica.wgpu.gpu.device import Device


def figures(model: Path, data: Path, backend: str) -> tuple[dict[str, float], str]:
    arguments = [str(model), "--data", str(data), "--max-seq-len", "24", "--json"]
    arguments += ["--gpu-backend", backend, "--threads", "1"]
    done = click.testing.CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_figures_are_those_of_the_cpu(device: Device, tmp_path: Path) -> None:
    data = small.write_data(tmp_path / "validation.jsonl")
    model = small.write_model(tmp_path / "model", data)
    mine, said = figures(model, data, "wgpu")
    theirs, _ = figures(model, data, "cpu")
    assert "on wgpu:0" in said
    assert mine["weight"] == theirs["weight"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-4)
