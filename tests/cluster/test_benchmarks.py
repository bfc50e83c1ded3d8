"""The benchmarks run, and the networks that they make vanish with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.waiting import PATIENCE, wait_for

BENCHMARKS = ROOT / "benchmarks"

HOLD_A_NETWORK = """
import time
from benchmarks.rig.network import ShapedNetwork
with ShapedNetwork(2, 10**9) as network:
    print(*network._holders, flush=True)
    while True:  # a signal that comes just before a sleep is heard after it
        time.sleep(0.1)
"""


def network_is_missing() -> str | None:
    script = "from benchmarks.rig.network import missing; print(missing() or '')"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCHMARKS, check=True, capture_output=True, text=True
    )
    return found.stdout.strip() or None


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_a_network_vanishes_with_its_benchmark(number: signal.Signals):
    if reason := network_is_missing():
        pytest.skip(reason)
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_NETWORK],
        cwd=BENCHMARKS,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holding.stdout is not None
    with holding.stdout as output:
        holders = [int(word) for word in output.readline().split()]
        assert len(holders) == 2
        holding.send_signal(number)
        holding.wait(PATIENCE)
    wait_for(lambda: all(map(is_gone, holders)), "no namespace outlives its benchmark")


def figures_of(benchmark: str, words: str, codes: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """Return what a short run of a benchmark wrote.

    Args:
        codes: of its end that are right; 1 is a missed target, on a busy machine.
    """
    result = BENCHMARKS / "results" / f"smoke-{os.getpid()}.json"
    command = [sys.executable, f"{benchmark}.py", "--result", result.stem, *words.split()]
    try:
        run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
        assert run.returncode in codes, run.stderr
        return json.loads(result.read_text(encoding="utf-8"))
    finally:
        result.unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.cluster
def test_the_exchange_is_measured_in_shaped_namespaces():
    if reason := network_is_missing():
        pytest.skip(reason)
    words = "--rate 1000 --megabytes 1.2 --codec bf16 --steps 2 --no-ring --no-plaintext"
    figures = figures_of("exchange", words, codes=(0,))
    assert len(figures["ratios"]) == 4
    # A ratio below that of the shaper's burst would mean that the links are not shaped.
    assert all(ratio["value"] > 0.5 for ratio in figures["ratios"])


@pytest.mark.cluster
def test_codecs_are_measured_beside_a_memcpy():
    figures = figures_of("codecs", "--elements 70000 --repeats 1")
    assert all(ratio["value"] > 0 for ratio in figures["ratios"])
    nbytes = {each["ratio"]: each.get("bytes_an_element") for each in figures["figures"]}
    assert nbytes["int8 encode"] == pytest.approx(1.016, abs=1e-3)
    assert nbytes["int4 encode"] == pytest.approx(0.531, abs=1e-3)
