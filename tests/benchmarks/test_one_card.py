"""`benchmarks/one_card.py` on the CPU: what it measures, compares, leaves out and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

SMALL = "--shape tiny --device cpu --rows 2 --tokens 16 --steps 2 --repeats 1"


def run(folder: Path, words: str) -> tuple[int, str, Any]:
    """Return exit code, what it said, and its results."""
    file = folder / "results.json"
    command = [sys.executable, "benchmarks/one_card.py", "--output", str(file), *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    written = json.loads(file.read_text()) if file.exists() else None
    return done.returncode, done.stdout + done.stderr, written


@pytest.mark.long
@pytest.mark.parametrize("words", ["lora full --profile", "qlora --recompute"])
def test_each_trainer_takes_the_same_steps(tmp_path: Path, words: str) -> None:
    code, said, results = run(
        tmp_path, f"{SMALL} --models {tmp_path} --trainers motley peft --methods {words}"
    )
    assert code == 0, said
    processes = [figures for figures in results["figures"] if "trainer" in figures]
    methods = words.partition(" --")[0].split()
    assert [(each["method"], each["trainer"]) for each in processes] == [
        (method, trainer) for method in methods for trainer in ("motley", "peft")
    ]
    for figures in processes:
        assert len(figures["seconds"]) == 2
        assert len(figures["losses"]) == 4
        assert figures["losses"][0] == pytest.approx(6.3, abs=0.1)  # of 512 tokens that it guesses
        assert figures["tokens_per_second"] > 0
        assert figures["peak_bytes"] > figures["plan_bytes"] > 0
        assert figures["recompute"] == ("--recompute" in words)
        if "--profile" in words:
            assert any("mm" in row["name"] for row in figures["profile"]["largest"])
            waits = figures["profile"]["host_waits"]  # PEFT's loop asks for the loss
            assert figures["trainer"] == "motley" or waits["aten::_local_scalar_dense"]["calls"]
    apart = [each for each in results["ratios"] if "losses apart" in each["name"]]
    assert apart
    assert all(each["met"] for each in apart)
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["tiny"]


def test_what_does_not_fit_its_time_is_named(tmp_path: Path) -> None:
    code, said, results = run(
        tmp_path, f"{SMALL} --seconds 1 --methods lora --trainers motley peft"
    )
    assert code == 0, said
    assert [sorted(each) for each in results["figures"]] == [
        ["left_out", "method", "trainer", "turn"]
    ] * 2
    assert "lora, motley: not done when its" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--rows 0", "needs at least 1"),
        ("--models {folder}/results.json", "results.json"),
        ("--models {folder}", "tiny: not a model folder of the shape tiny; remove it"),
        ("--trainers trl", "--trainers trl: trl is not installed"),
    ],
)
def test_it_refuses_in_a_line(tmp_path: Path, words: str, complaint: str) -> None:
    (tmp_path / "tiny").mkdir()
    code, said, _ = run(tmp_path, f"--device cpu {words.format(folder=tmp_path)}")
    assert code == 2
    assert complaint in said.splitlines()[-1]


def test_a_process_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_card: Any
) -> None:
    figures = {
        "tokens_per_second": 8.0,
        "mfu": None,
        "peak_bytes": 9,
        "plan_bytes": 8,
        "losses": [2.0],
    }

    def process(job: dict[str, Any], _seconds: float) -> dict[str, Any]:
        return {"error": "out of memory"} if job["trainer"] == "motley" else figures

    monkeypatch.setattr(one_card, "run_process", process)
    words = f"{SMALL} --methods lora --trainers motley peft --output {tmp_path}/found.json"
    assert one_card.main(words.split()) == 1
    found = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert [each.get("error") for each in found] == ["out of memory", None]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"losses": [2.0, 1.03]}, ["lora: losses apart, at most"]),
        ({"tokens_per_second": 9.0}, ["lora: Motley's tokens/s"]),
        ({"peak_bytes": 96}, ["lora: Motley's peak"]),
        ({"plan_bytes": 80}, ["lora: Motley's peak"]),
    ],
)
def test_a_mark_for_cards_is_missed(
    tmp_path: Path, change: dict[str, Any], missed: list[str], one_card: Any
) -> None:
    other = {"tokens_per_second": 10.0, "peak_bytes": 101, "losses": [2.0, 1.0]}
    own = {"tokens_per_second": 11.0, "peak_bytes": 90, "plan_bytes": 88, "losses": [2.0, 1.0]}
    for device, expected in (("cuda", missed), ("cpu", [m for m in missed if "losses" in m])):
        report = one_card.Report("compared", tmp_path / "compared.json")
        one_card.compare({"lora": {"motley": [own | change], "peft": [other]}}, device, report)
        assert [ratio.name for ratio in report.ratios if ratio.met is False] == expected
