"""The eval runner in this process: what it records, and what becomes of what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import small_model as small

from trainer.checkpoint import CheckpointStore, RunProgress
from trainer.errors import InputError, StorageError
from trainer.evaluate.base import Compute, Outcome
from trainer.evaluate.claims import Claims
from trainer.evaluate.results import SCHEMA, read_evaluations
from trainer.evaluate.runner import Manner, Runner
from trainer.evaluate.tasks import Material, make_tasks
from trainer.initialization import initial_weights, uniform
from trainer.layout import build_layout
from trainer.optimizer import TrainState
from trainer.scoring import score
from trainer.state import BEST_EVALUATED, checkpoint_digest
from trainer.storage import verify
from trainer.trained import Trained, load_trained

if TYPE_CHECKING:
    from tests.conftest import MakeConfig

CPU = Compute("cpu", threads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "validation.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "model", data)


class Run:
    """A run's output folder, whose checkpoints have random weights."""

    def __init__(self, output: Path, model: Path, make_config: MakeConfig, **settings: Any) -> None:
        settings = {"task": "causal-lm", "data__max_seq_len": 24, **settings}
        self.output = output
        self._config = make_config(model, **settings)
        self._layout = build_layout(model, self._config)
        self._start = initial_weights(self._layout, model, self._config)
        store = output / "checkpoints"
        self._store = CheckpointStore(store, self._layout, self._config, model)

    def save(self, step: int, scale: float = 0.5) -> Path:
        weights = self._start.copy()
        for slot in self._layout.tensors():
            if slot.name.endswith("lora_B.weight"):
                weights[slot.start : slot.stop] = uniform(step, slot.name, slot.size, scale)
        zeros = np.zeros_like(weights)
        state = TrainState(weights, zeros, zeros.copy(), step=step)
        tree = self._config.model_dump(mode="json")
        return self._store.save(state.snapshot(), RunProgress("run", step, 0, 8, 0, 0, tree))

    def status(self, state: str) -> None:
        tree = {"schema": "motley.status/1", "state": state}
        (self.output / "status.json").write_text(json.dumps(tree))

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_evaluations(self.output / "evaluations" / "evaluations.jsonl")


@pytest.fixture
def run(tmp_path: Path, model: Path, make_config: MakeConfig) -> Run:
    return Run(tmp_path / "run", model, make_config, checkpoint__keep_last=3)


class Probe:
    """A task that does what a test tells it to with the checkpoint's folder."""

    name = "probe"

    def __init__(self, action: Callable[[Path], object] = lambda _: None) -> None:
        self.seen: list[str] = []
        self._action = action

    def run(self, trained: Trained, compute: Compute) -> Outcome:
        self.seen.append(trained.path.name)
        self._action(trained.path)
        return Outcome({"figure": float(trained.path.name[-1])}, "figure")


def runner(run: Run, *tasks: Any, once: bool = True, name: str = "runner", **manner: Any) -> Runner:
    manner = {"every": 0.05, "claim_timeout": 30.0, **manner}
    return Runner(run.output, tasks, CPU, Manner(name=name, once=once, **manner))


def claims(run: Run, name: str = "other") -> Claims:
    made = Claims(run.output / "evaluations" / "claims", name, 30.0)
    made.look()
    return made


def test_every_checkpoint_is_scored_once_newest_first(run: Run, data: Path) -> None:
    paths = [run.save(step, scale) for step, scale in ((1, 0.5), (2, 0.01), (3, 3.0))]
    tasks = make_tasks("loss,generate", Material(data=[data], prompts=data, max_new_tokens=3))
    runner(run, *tasks).run()
    assert [record["step"] for record in run.records] == [3, 2, 1]
    for record, path in zip(run.records, reversed(paths), strict=True):
        scores = score(load_trained(path), data, threads=1)
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


def test_a_classifier_is_rated_by_its_accuracy(
    tmp_path: Path, model: Path, data: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config, task="classify", num_classes=3)
    run.save(1)
    other = data.with_name("other.jsonl")
    shutil.copy(data, other)
    runner(run, *make_tasks("loss", Material(data=[data, other]))).run()
    (record,) = run.records
    figures = record["tasks"]["loss"]["figures"]
    assert figures["validation/accuracy"] == figures["other/accuracy"] == record["rating"]
    assert record["rated_by"] == "loss/validation/accuracy"
    assert {"validation/loss", "validation/mcc"} < figures.keys()


def test_what_needs_a_language_model_says_so_and_costs_no_other_figure(
    tmp_path: Path, model: Path, data: Path, make_config: MakeConfig
) -> None:
    run = Run(tmp_path / "run", model, make_config, task="classify", num_classes=3)
    run.save(1)

    def defect(_: Path) -> None:
        raise ZeroDivisionError("by zero")

    tasks = make_tasks("generate,loss", Material(data=[data], prompts=data))
    runner(run, *tasks, Probe(defect)).run()
    (record,) = run.records
    assert record["state"] == "scored"
    assert "only language models generate" in record["tasks"]["generate"]["error"]
    assert record["tasks"]["probe"] == {"error": "ZeroDivisionError: by zero"}
    assert record["tasks"]["loss"]["figures"].keys() == {"loss", "accuracy", "mcc"}
    assert record["rated_by"] is None, "the first task has no figure, and no other takes its place"


def test_a_damaged_checkpoint_is_named_once_and_left_out(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        run.save(step)
    store = run.output / "checkpoints"
    cut, flipped = (
        store / "step-000002" / "run.json",
        store / "step-000003" / "optimizer.safetensors",
    )
    cut.write_bytes(cut.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    probe = Probe()
    looks = 0

    def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            run.status("finished")

    watching = runner(run, probe, once=False)
    watching._interruption.wait = look
    watching.run()
    assert probe.seen == ["step-000001"]
    assert [record["step"] for record in run.records] == [1]
    said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "step-000002/run.json: has" in said[0]
    assert "step-000003/optimizer.safetensors: its bytes are not those" in said[1]
    assert claims(run).take(checkpoint_digest(flipped.parent)) is not None, "it was given back"


def test_a_half_written_checkpoint_is_never_read(run: Run) -> None:
    whole = run.save(1)
    half = whole.with_name("step-000002")
    shutil.copytree(whole, half)
    (half / "manifest.json").unlink()
    shutil.copytree(whole, whole.with_name(".tmp-step-000003-abcd"))
    probe = Probe()
    runner(run, probe).run()
    assert probe.seen == ["step-000001"]


def test_what_was_pruned_before_its_turn_is_recorded_as_skipped(run: Run) -> None:
    for step in (1, 2):
        run.save(step)

    def train_on(_: Path) -> None:
        if not (run.output / "checkpoints" / "step-000005").exists():
            for step in (3, 4, 5):
                run.save(step)

    probe = Probe(train_on)
    runner(run, probe).run()
    assert probe.seen == ["step-000002", "step-000005", "step-000004", "step-000003"]
    states = {record["step"]: (record["state"], record["reason"]) for record in run.records}
    assert states.pop(1) == ("skipped", "removed before it was scored")
    assert set(states.values()) == {("scored", None)}


def test_what_is_scored_is_pinned_until_the_link_may_show_it(run: Run) -> None:
    held = run.save(9)

    def train_on(path: Path) -> None:
        if path == held:
            for step in (12, 13, 14, 15):
                run.save(step)
            verify(held)

    runner(run, Probe(train_on)).run()
    assert {record["state"] for record in run.records} == {"scored"}
    assert (held.parent / BEST_EVALUATED).readlink().name == "step-000009"
    run.save(16)
    assert held.is_dir(), "pruning keeps what the link shows"


def test_where_locks_do_not_reach_a_checkpoint_may_vanish(run: Run, data: Path) -> None:
    """What was figured out by then counts; what came to nothing says why, and the next is taken."""
    for step in (1, 2, 3):
        run.save(step)

    def vanish(path: Path) -> None:
        if path.name != "step-000001":
            shutil.rmtree(path)
            raise StorageError(f"{path}: cannot be read")

    (loss,) = make_tasks("loss", Material(data=[data]))
    runner(run, loss, Probe(vanish)).run()
    records = {record["step"]: record for record in run.records}
    assert [records[step]["state"] for step in (1, 2, 3)] == ["scored"] * 3
    gone = {"error": "the checkpoint was removed while it was read"}
    assert records[3]["tasks"]["probe"] == records[2]["tasks"]["probe"] == gone
    assert records[3]["tasks"]["loss"]["figures"]["loss"] > 0
    assert (run.output / "checkpoints" / BEST_EVALUATED).readlink().name == "step-000001"


def test_a_folder_that_is_away_is_waited_for(run: Run) -> None:
    run.save(1)
    aside = run.output.with_name("aside")
    times: list[float] = []

    def come_back() -> None:
        time.sleep(0.5)
        aside.rename(run.output)

    back = threading.Thread(target=come_back)

    def go_away(path: Path) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            run.output.rename(aside)
            back.start()
            verify(path)

    runner(run, Probe(go_away)).run()
    back.join()
    assert len(times) == 2
    assert [record["state"] for record in run.records] == ["scored"]


def test_a_result_that_cannot_be_written_yet_is_kept(run: Run) -> None:
    run.save(1)
    aside = run.output.with_name("aside")

    def come_back() -> None:
        time.sleep(0.5)
        aside.rename(run.output)

    back = threading.Thread(target=come_back)

    def go_away(_: Path) -> None:
        run.output.rename(aside)
        back.start()

    probe = Probe(go_away)
    runner(run, probe).run()
    back.join()
    assert probe.seen == ["step-000001"]
    assert [record["state"] for record in run.records] == ["scored"]
    assert not aside.exists()


def test_a_result_that_comes_after_a_takeover_is_void(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    digest = checkpoint_digest(run.save(1))
    clock = [0.0]
    record = {
        "schema": SCHEMA,
        "checkpoint": "step-000001",
        "step": 1,
        "digest": digest,
        "runner": "other",
        "time": 1.0,
        "rated_by": None,
        "tasks": {},
    }

    def taken_over(path: Path) -> None:
        other = Claims(run.output / "evaluations" / "claims", "other", 0.1, lambda: clock[0])
        for _ in range(6):
            other.look()
            clock[0] += 0.04
        claim = other.take(digest)
        assert claim is not None
        assert claim.deliver(record)

    runner(run, Probe(taken_over)).run()
    assert "this result is void" in caplog.text
    assert claims(run).look()[digest].record == record
    assert run.records == [record]


def test_what_a_dead_runner_did_not_list_is_listed(run: Run) -> None:
    for step in (1, 2):
        run.save(step)
    runner(run, Probe()).run()
    listed = run.records
    link = run.output / "checkpoints" / BEST_EVALUATED
    (run.output / "evaluations" / "evaluations.jsonl").unlink()
    link.unlink()
    probe = Probe()
    runner(run, probe, name="second").run()
    assert probe.seen == []
    assert sorted(r["step"] for r in run.records) == sorted(r["step"] for r in listed) == [1, 2]
    assert link.readlink().name == "step-000002"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_gives_the_claim_back(
    run: Run, number: signal.Signals
) -> None:
    digest = checkpoint_digest(run.save(1))
    before = signal.getsignal(number)

    def interrupted(_: Path) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    began = time.monotonic()
    runner(run, Probe(interrupted), once=False).run()
    assert time.monotonic() - began < 30
    assert claims(run).take(digest) is not None
    assert not (run.output / "evaluations" / "evaluations.jsonl").exists()
    assert signal.getsignal(number) == before


def test_a_signal_that_a_library_swallows_still_ends_it(run: Run) -> None:
    digest = checkpoint_digest(run.save(1))

    def swallowing(_: Path) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    runner(run, Probe(swallowing), once=False).run()
    assert claims(run).take(digest) is not None


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
        run.status("finished")

    training = threading.Thread(target=train)
    training.start()
    watching = Runner(output, [probe], CPU, Manner(name="runner", every=0.05))
    watching.run()
    training.join()
    assert probe.seen == ["step-000001", "step-000002", "step-000003"]
    assert caplog.text.count("no checkpoint there, waiting") == 1


def test_a_folder_of_checkpoints_alone_is_enough(run: Run) -> None:
    run.save(1)
    probe = Probe()
    store = run.output / "checkpoints"
    Runner(store, [probe], CPU, Manner(name="runner", once=True)).run()
    assert probe.seen == ["step-000001"]
    assert len(read_evaluations(store / "evaluations" / "evaluations.jsonl")) == 1


def test_a_base_that_is_missing_here_ends_it_and_leaves_the_checkpoint_to_others(
    run: Run,
) -> None:
    digest = checkpoint_digest(run.save(1))
    with pytest.raises(InputError, match="/nowhere: no such model"):
        runner(run, Probe(), base="/nowhere").run()
    assert claims(run).take(digest) is not None


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("loss", "give --data"),
        ("loss,loss", "'loss' twice"),
        ("speed", "'speed' is not known"),
        ("", "'' is not known"),
        ("generate", "give --prompts"),
        ("code", "give --problems"),
    ],
)
def test_tasks_that_lack_something_are_refused_at_the_start(tasks: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_tasks(tasks, Material())


def test_code_is_not_run_unless_that_is_allowed(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "", "test": "", "entry_point": "f"}))
    with pytest.raises(InputError, match="allow it with --run-code"):
        make_tasks("code", Material(problems=problems))
    with pytest.raises(InputError, match="give --temperature"):
        make_tasks("code", Material(problems=problems, run_code=True, samples=2))
