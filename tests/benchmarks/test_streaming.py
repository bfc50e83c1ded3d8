"""`benchmarks/streaming.py` with a small model: what it compares, and the pace of its reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter

LAYERS, HIDDEN = 4, 64
WORDS = f"--layers {LAYERS} --hidden-size {HIDDEN} --tokens 32 --rounds 2"
LAYER = 4 * HIDDEN * HIDDEN * (4 + 3 * 4)
"""Bytes of a layer's linears in fp32."""


def measure(folder: Path, *parts: str) -> Any:
    command = [sys.executable, "benchmarks/streaming.py", *WORDS.split(), "--part", *parts]
    environment = os.environ | {"BENCHMARK_RESULTS": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1 is a missed target
    return json.loads((folder / "streaming.json").read_text())


@pytest.mark.long
def test_steps_on_a_device_are_compared_with_its_resident_ones(
    vulkan: Adapter, tmp_path: Path
) -> None:
    figures = {each["ratio"]: each for each in measure(tmp_path, "vulkan")["figures"]}
    for form in ("fp32", "NF4"):
        title = f"{vulkan.name}, {form}, layers are read: processor time"
        for step in figures[title]["rounds"]:
            assert step["resident"]["read"] == 0 < step["streamed"]["read"]


@pytest.mark.long
def test_steps_that_read_are_compared_with_resident_ones(tmp_path: Path) -> None:
    results = measure(tmp_path, "step", "paced")
    figures = {each["ratio"]: each for each in results["figures"]}
    assert all(ratio["value"] > 0 for ratio in results["ratios"])
    # At each turn both slots have the layers that are needed first.
    read = 2 * (LAYERS - 2) * LAYER
    for step in figures["fp32, layers are read: processor time"]["rounds"]:
        assert (step["resident"]["read"], step["streamed"]["read"]) == (0, read)
    paced = [each for name, each in figures.items() if name.startswith("reads at")]
    assert len(paced) == 3
    for figure in paced:
        for step in figure["rounds"]:
            assert step["read"] == read
            assert step["elapsed"] >= read / figure["bytes_per_second"]
