"""A comparison's text: limits, bytes, absent backends, and its forms."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

from benchmarks.rig import backends, cluster, comparison
from benchmarks.rig.backends import BACKENDS
from benchmarks.rig.comparison import Row
from tests import ROOT


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the script, but for what it does to SIGTERM, which here is pytest's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(cluster, "end_on_terminate", lambda: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    return importlib.import_module("compare").main()


ROWS = [
    Row("ours", 5.3, 200, 430.0, 424.0, 10_700_000, 450.0, 10_800_000, 5.5, 5.51),
    Row("gloo", 5.3, None, 30.0, None, None, 61.0, None, 5.5, 5.51),
    Row("mpi", 5.3, 200, absent="mpi4py is missing: pip install it"),
]


def test_limits_are_those_of_the_busiest_link() -> None:
    """A star's is the coordinator's, whose own worker sends nothing over it."""
    assert [BACKENDS["ours"].limit(workers) for workers in (2, 3, 4)] == [1, 2, 3]
    for name in ("gloo", "nccl", "mpi"):
        assert BACKENDS[name].limit(4) == 1.5
    assert BACKENDS["ours"].limit(2) == BACKENDS["gloo"].limit(2)


def test_bytes_are_of_the_busiest_interface_and_direction() -> None:
    steps = [
        [{"sent": 10.0 + 5 * step, "received": 0.0}, {"sent": 7.0, "received": 70.0 * step}]
        for step in range(4)
    ]
    assert comparison.moved_bytes(steps) == 70


def test_a_time_is_from_the_first_start_to_the_last_end() -> None:
    step = [
        {"first_send": 1.0, "last_average": 4.0},
        {"first_send": 0.5, "last_average": 3.0},
    ]
    assert comparison.span(step) == 3.5


def test_what_is_absent_is_named_with_the_way_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: name != "mpi4py" or None)
    words = ["--backend", "mpi", "--megabytes", "0.1"]
    assert run(monkeypatch, *words) == 0
    assert "not measured: mpi4py is missing: pip install 'motley[compare]'" in (
        capsys.readouterr().out
    )
    assert run(monkeypatch, *words, "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == "motley.compare/1"
    (row,) = tree["rows"]
    assert row["absent"].startswith("mpi4py is missing")
    assert row["sum_milliseconds"] is None


def test_nccl_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "NVIDIA devices" in (BACKENDS["nccl"].missing(2) or "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "there are 1: --workers 1" in (BACKENDS["nccl"].missing(2) or "")


def test_rates_without_root_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(monkeypatch, "--rate", "200") == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith(
        "needs root for network namespaces; without --rate the loopback is measured"
    )
    assert "\n" not in said
