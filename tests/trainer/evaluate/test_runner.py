"""The eval runner in this process: what it scores, in which order, and when it ends."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.saved_run import CPU, Probe, Run, runner
from trainer.checkpoint.reader import BEST_EVALUATED, checkpoint_digest
from trainer.checkpoint.trained_model import load_trained
from trainer.evaluate.results import read_evaluations
from trainer.evaluate.runner import Runner, RunnerOptions
from trainer.evaluate.scoring import score_file
from trainer.evaluate.tasks import TaskOptions, make_tasks
from trainer.replica.backend import Compute
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


def test_every_checkpoint_is_scored_once_newest_first(run: Run, data: Path) -> None:
    paths = [run.save(step, scale) for step, scale in ((1, 0.5), (2, 0.01), (3, 3.0))]
    tasks = make_tasks("loss,generate", TaskOptions(data=[data], prompts=data, max_new_tokens=3))
    runner(run, *tasks).run()
    assert [record["step"] for record in run.records] == [3, 2, 1]
    for record, path in zip(run.records, reversed(paths), strict=True):
        scores = score_file(load_trained(path), data, Compute("cpu", threads=1))
        figures = record["tasks"]["loss"]["figures"]
        assert figures == {"loss": scores.loss, "perplexity": scores.perplexity}
        assert (record["rated_by"], record["rating"]) == ("loss/loss", -scores.loss)
        assert record["digest"] == checkpoint_digest(path)
        assert (record["state"], record["runner"]) == ("scored", "runner")
        texts = record["tasks"]["generate"]["samples"]
        assert len(texts) == 40
        assert texts[0]["prompt"].startswith("rm -rf $dir")
        assert record["tasks"]["generate"]["figures"]["tokens"] <= 3
    best = min(run.records, key=lambda record: record["tasks"]["loss"]["figures"]["loss"])
    link = run.output / "checkpoints" / BEST_EVALUATED
    assert link.readlink().name == best["checkpoint"]
    probe = Probe()
    runner(run, probe, name="second").run()
    assert probe.seen == []
    assert len(run.records) == 3


def test_it_waits_for_a_run_that_is_not_there_yet(
    tmp_path: Path, model: Path, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = tmp_path / "later"
    probe = Probe()

    def train() -> None:
        while "no checkpoint there, waiting" not in caplog.text:
            time.sleep(0.01)
        run = Run(output, model, make_config)
        run.status("running")
        for step in (1, 2):
            run.save(step)
            while len(probe.seen) < step:
                time.sleep(0.01)
        run.save(3)
        run.status("completed")

    training = threading.Thread(target=train)
    training.start()
    watching = Runner(output, [probe], CPU, RunnerOptions(name="runner", every=0.05))
    watching.run()
    training.join()
    assert probe.seen == ["step-000001", "step-000002", "step-000003"]
    assert caplog.text.count("no checkpoint there, waiting") == 1


def test_a_folder_of_checkpoints_alone_is_enough(run: Run) -> None:
    run.save(1)
    probe = Probe()
    store = run.output / "checkpoints"
    Runner(store, [probe], CPU, RunnerOptions(name="runner", once=True)).run()
    assert probe.seen == ["step-000001"]
    assert len(read_evaluations(store / "evaluations" / "evaluations.jsonl")) == 1


@pytest.mark.parametrize("name", ["evaluations", "evaluations/evaluations.jsonl"])
def test_results_are_written_through_no_link(tmp_path: Path, name: str) -> None:
    """The folder may have been copied from elsewhere."""
    output, victim = tmp_path / "output", tmp_path / "victim"
    (output / name).parent.mkdir(parents=True)
    (output / name).symlink_to(victim)
    with pytest.raises(InputError, match=f"{output / name}: is a link, and nothing is written"):
        Runner(output, [Probe()], CPU, RunnerOptions(name="runner", every=0.05))
    assert not victim.exists()
