"""The list of evaluations has each checkpoint once, and the link shows the best."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tiny_run import make_store, save
from trainer.checkpoint.reader import BEST_EVALUATED, checkpoint_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.evaluate.results import SCHEMA, Results, read_evaluations


def evaluation(digest: str, step: int = 1, loss: float | None = 0.5, text: str = "") -> Any:
    return {
        "schema": SCHEMA,
        "checkpoint": f"step-{step:06d}",
        "digest": digest,
        "step": step,
        "time": 1.0,
        "rated_by": "loss/loss",
        "rating": None if loss is None else -loss,
        "tasks": {"loss": {"figures": {"loss": loss}}, "generate": {"samples": [{"text": text}]}},
    }


def test_several_runners_add_each_record_once(tmp_path: Path) -> None:
    """Whole lines, also where a text holds every kind of line end."""
    folder = tmp_path / "evaluations"
    text = "a\nb\r\x0b\x85\u2028\u2029c"
    records = [evaluation(f"{number:064x}", number, text=text) for number in range(40)]
    runners = [Results(folder, f"runner-{number}") for number in range(4)]

    def publish(runner: Results) -> int:
        return sum(runner.publish(record) for record in records)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(publish, runners)) == 40
    for runner in runners:
        runner.close()
    path = folder / "evaluations.jsonl"
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert sorted(json.loads(line)["step"] for line in lines) == list(range(40))
    assert all(r["tasks"]["generate"]["samples"][0]["text"] == text for r in read_evaluations(path))


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    results = Results(folder, "runner")
    assert results.publish(evaluation("a" * 64))
    with (folder / "evaluations.jsonl").open("ab") as file:
        file.write(json.dumps(evaluation("b" * 64)).encode()[:50])
    assert results.publish(evaluation("b" * 64))
    assert not results.publish(evaluation("a" * 64))
    results.close()
    found = read_evaluations(folder / "evaluations.jsonl")
    assert [record["digest"][0] for record in found] == ["a", "b"]


def test_tensorboard_shows_the_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = Results(tmp_path, "runner")
    for step, loss in ((1, 0.5), (2, None), (3, 0.25)):
        results.publish(evaluation(str(step) * 64, step, loss))
    results.close()
    board = EventAccumulator(str(tmp_path / "tensorboard" / "runner"))
    board.Reload()
    scalars = board.Scalars("evaluation/loss/loss")
    assert [(event.step, event.value) for event in scalars] == [(1, 0.5), (3, 0.25)]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return make_store(tmp_path / "checkpoints", keep_last=10)


def test_the_link_follows_the_best_that_is_still_there(
    tmp_path: Path, store: CheckpointStore
) -> None:
    results = Results(tmp_path / "evaluations", "runner")
    link = store.folder / BEST_EVALUATED
    shown: list[str] = []
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.7), (4, 0.5), (5, None), (6, float("inf"))):
        path = save(store, step)
        results.publish(evaluation(checkpoint_digest(path), step, loss))
        results.point_to_best(store.folder, "loss/loss")
        shown.append(link.readlink().name[-1])
    assert shown == list("122222"), "of equals the first stays, and what has no figure is not rated"
    shutil.rmtree(store.folder / "step-000002")
    results.point_to_best(store.folder, "loss/loss")
    assert link.readlink().name == "step-000004"
    results.point_to_best(store.folder, "code/pass@1")
    results.close()
    assert link.readlink().name == "step-000004", "nothing is rated by another figure"
