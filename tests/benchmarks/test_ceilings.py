"""`benchmarks/ceilings.py` and `one_seed.py` on the CPU: what they write, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


def run(results: Path, script: str, *words: str) -> tuple[str, Any]:
    """Return what a benchmark said, and its results."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *words],
        cwd=ROOT,
        env={**os.environ, "BENCHMARK_RESULTS": str(results), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = results / f"{script}.json"
    return done.stdout, json.loads(file.read_text()) if file.exists() else None


def test_copies_and_products_have_a_rate(tmp_path: Path) -> None:
    said, results = run(tmp_path, "ceilings", "--device", "cpu", "--size", "32", "--mib", "1")
    names = [ratio["name"] for ratio in results["ratios"]]
    assert [name.partition(",")[0] for name in names] == [
        "copy on the device",
        "copy from pageable memory",
        "product in bf16",
        "product in tf32",
        "product in fp32",
    ]
    assert all(ratio["value"] > 0 for ratio in results["ratios"])
    assert len(said.splitlines()) == len(names)


@pytest.mark.long
def test_equal_seeds_give_equal_losses_on_one_backend(tmp_path: Path) -> None:
    _, results = run(
        tmp_path, "one_seed", "--backends", "cpu", "cpu", "--steps", "2", "--precisions", "fp32"
    )
    (ratio,) = results["ratios"]
    assert ratio["value"] == 0
    assert ratio["met"]
    (figures,) = results["figures"]
    assert len(figures["losses"]) == 2


@pytest.mark.parametrize("script", ["ceilings", "one_seed"])
def test_without_a_card_nothing_is_measured(tmp_path: Path, script: str) -> None:
    said, results = run(tmp_path, script)
    assert said.startswith("skipped: no CUDA device")
    assert results is None
