"""`benchmarks/streaming.py` with a small model: what it compares, and the pace of its reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

LAYERS, HIDDEN = 4, 64
WORDS = f"--part step paced --layers {LAYERS} --hidden-size {HIDDEN} --tokens 32 --rounds 2"
LAYER = 4 * HIDDEN * HIDDEN * (4 + 3 * 4)
"""Bytes of a layer's linears in fp32."""


@pytest.mark.long
def test_steps_that_read_are_compared_with_resident_ones(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/streaming.py", *WORDS.split()]
    environment = os.environ | {"BENCHMARK_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1 is a missed target
    results = json.loads((tmp_path / "streaming.json").read_text())
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
