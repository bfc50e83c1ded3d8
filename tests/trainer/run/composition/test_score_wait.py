"""The wait of a student for the scores of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint.reader import checkpoint_digest
from trainer.evaluate.claims import Claim, Claims
from trainer.evaluate.results import EVALUATIONS, SCHEMA
from trainer.run.composition import student_role
from trainer.run.composition.student_role import await_scores
from trainer.system.storage.atomic_folder import Disk, FolderWriter

RESULT = {"schema": SCHEMA, "digest": "d", "loss": 1.0}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_role, "_LOOK", 0.01)


def checkpoint(output: Path, step: int) -> str:
    """Write one that is complete; return its digest."""
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    writer = FolderWriter(Disk(), output / "checkpoints", f"step-{step:06d}")
    writer.write_file("weights", [str(step).encode()])
    return checkpoint_digest(writer.publish())


def claimed(output: Path, digest: str) -> Claim:
    claims = Claims(output / EVALUATIONS / "claims", "runner", 10.0)
    claims.read_states()
    claim = claims.take_claim(digest)
    assert claim is not None
    return claim


class Looks:
    """What happens at the n-th look, until the wait is over."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.events = list(events)

    def __call__(self) -> bool:
        if self.events:
            self.events.pop(0)()
        return False


def test_it_ends_with_the_last_score(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    claim, late = claimed(tmp_path, first), claimed(tmp_path, second)
    looks = Looks(
        lambda: None, lambda: claim.deliver(RESULT), lambda: None, lambda: late.deliver(RESULT)
    )
    progress: list[int] = []
    await_scores(tmp_path, looks, lambda: progress.append(len(looks.events)))
    assert progress == [2, 0], "with each result"


def test_a_stop_ends_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    looked: list[bool] = []
    await_scores(tmp_path, lambda: len(looked) > 2 or bool(looked.append(True)), lambda: None)
    assert len(looked) == 3


def test_a_runner_without_a_sign_of_life_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claimed(tmp_path, checkpoint(tmp_path, 10))
    with caplog.at_level(logging.WARNING):
        await_scores(tmp_path, lambda: False, lambda: None, patience=0.05)
    assert "no eval runner is running" in caplog.text
