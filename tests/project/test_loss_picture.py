"""The picture of the loss: its lines are the figures of the run's metrics file."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from trainer.exchange.protocol.actions import Step
from trainer.tracking.metrics import MetricsLog

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
TRAINING = {1: 6.25, 2: 4.0, 3: 4.5, 4: 3.0, 6: 2.5}
VALIDATION = {2: 4.25, 6: 2.75}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a run that went on from step 2 and had one loss that is NaN."""
    folder = tmp_path_factory.mktemp("output")
    log = MetricsLog(folder)
    for step, loss in {1: 6.25, 2: 4.0, 3: 99.0}.items():
        record_step(log, step, loss)
    log.validation(2, loss=VALIDATION[2])
    log.event("resumed", 2)
    for step, loss in {3: 4.5, 4: 3.0, 5: float("nan"), 6: 2.5}.items():
        record_step(log, step, loss)
    log.validation(6, loss=VALIDATION[6], accuracy=0.5)
    log.close()
    return folder


@pytest.fixture(scope="module")
def picture(run: Path) -> Path:
    """Return the picture of that run."""
    picture = run / "loss.svg"
    done = draw(run, picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{picture}: 5 steps, 2 validations\n"
    return picture


def record_step(log: MetricsLog, step: int, loss: float) -> None:
    log.step(
        Step(
            step=step,
            epoch=0,
            generation=1,
            loss=loss,
            learning_rate=1e-3,
            grad_norm=1.0,
            seconds=0.1,
            tokens_per_second=100.0,
            samples=[],
        )
    )


def draw(run: Path, picture: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/loss_picture.py", str(run), "-o", str(picture)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def points(picture: Path, name: str) -> np.ndarray:
    """Return the points of a drawn line, (n, 2), in the picture's own units."""
    (line,) = (g for g in ElementTree.parse(picture).iter(f"{SVG}g") if g.get("id") == name)
    path = line.find(f"{SVG}path")
    assert path is not None
    numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
    return np.array(numbers, dtype=float)


def test_its_points_are_the_losses_of_the_metrics_file(picture: Path) -> None:
    drawn = np.concatenate([points(picture, "training"), points(picture, "validation")])
    losses = np.array([*TRAINING.items(), *VALIDATION.items()])
    for axis in (0, 1):  # one scale for both lines
        scale, origin = np.polyfit(losses[:, axis], drawn[:, axis], 1)
        assert drawn[:, axis] == pytest.approx(scale * losses[:, axis] + origin, abs=1e-3)
        assert scale > 0 if axis == 0 else scale < 0  # an SVG's y grows downwards


def test_the_same_run_gives_the_same_file(run: Path, picture: Path, tmp_path: Path) -> None:
    assert draw(run, tmp_path / "again.svg").returncode == 0
    assert picture.read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_a_run_without_steps_is_refused_in_one_line(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    for content, why in ((None, "No such file or directory"), ("", "fewer than two steps")):
        if content is not None:
            metrics.write_text(content)
        done = draw(tmp_path, picture)
        assert done.returncode == 1
        assert done.stderr.startswith(f"loss_picture: {metrics}: {why}")
        assert done.stderr.count("\n") == 1
        assert not picture.exists()


def test_the_documents_picture_is_of_a_whole_run_and_small() -> None:
    picture = ROOT / "docs" / "loss-curve.svg"
    assert picture.stat().st_size < 60_000
    assert len(points(picture, "training")) == 420, "a point for each of the demo's steps"
    assert len(points(picture, "validation")) == 3
    across = points(picture, "training")[:, 0]
    assert all(before < after for before, after in pairwise(across))
