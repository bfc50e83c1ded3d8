"""A script under the exchange: real workers of unlike speed, losses of workers, codecs, rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.real_cluster import Bench, Cluster
from tests.trainer.script_run import losses, plain_losses, script_config, write_script
from tests.waiting import PATIENCE

pytestmark = pytest.mark.cluster

EPOCHS = 4
CPU = ("--gpu-backend", "cpu")


class Scripted(Cluster):
    """A cluster that trains a script."""

    def prepare(self, **settings: object) -> None:
        """Write the script and the config."""
        self.script = write_script(self.folder / "train.py")
        self.configure()
        fixed = {"exchange__join_deadline": PATIENCE, "checkpoint__every": 5}
        settings = {"training__epochs": EPOCHS, **fixed, **settings}
        run = script_config(self.output, **settings)
        self.settings = run
        self.run_file.write_text(run.to_yaml(exclude_unset=True))

    @property
    def named(self) -> tuple[str, ...]:
        """The options that name the script."""
        return ("--script", str(self.script))

    def begin(self, workers: int) -> None:
        """Start a coordinator and workers."""
        self.coordinator(workers, *self.named)
        for rank in range(workers):
            self.torch_worker(rank, *CPU, *self.named)

    def finish(self, *, expected: int = 0) -> None:
        """Wait until every process that was not killed has ended well."""
        for process in self.processes:
            if process.running or process.wait(1) >= 0:
                assert process.wait(PATIENCE) == expected, process.text


@pytest.fixture
def run(bench: Bench, tmp_path: Path) -> Iterator[Scripted]:
    made = Scripted(bench, tmp_path)
    try:
        yield made
    finally:
        made.end()
        print(made.logs())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_of_any_number_have_the_curve_of_a_plain_loop(run: Scripted, workers: int) -> None:
    shares = [1.0, 2.0, 4.0][:workers]
    run.prepare(exchange__split=shares if workers > 1 else "equal", training__evaluate_every=8)
    run.begin(workers)
    run.finish()
    expected, _ = plain_losses(run.script, run.settings)
    assert np.abs(losses(run.output) / expected - 1).max() < 1e-6
    assert run.events("verified")[-1]["at_step"] == len(expected)
    taken = [step["sample_ranges"] for step in run.records("step")]
    assert {len(shares) for shares in taken} == {workers}
    assert all("absolute" in each["figures"] for each in run.records("validation"))


def test_a_worker_that_is_killed_in_mid_step_changes_nothing(run: Scripted) -> None:
    run.prepare(training__epochs=400, exchange__hash_every=50)
    run.begin(2)
    run.wait_step(20)
    run.processes[-1].kill()
    run.wait_event("lost", rank=1)
    run.torch_worker(1, *CPU, *run.named)
    run.wait_event("rejoined", rank=1)
    for process in (run.processes[0], run.processes[1], run.processes[3]):
        assert process.wait(PATIENCE) == 0, process.text
    expected, _ = plain_losses(run.script, run.settings)
    found = losses(run.output)
    assert len(found) == len(expected)
    assert np.abs(found[:200] / expected[:200] - 1).max() < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange__codec": "int8"},
        {"exchange__schedule": "rounds", "exchange__inner_steps": 2, "exchange__rounds_after": 4},
    ],
)
def test_lossy_exchanges_learn_the_same(run: Scripted, settings: dict[str, object]) -> None:
    run.prepare(training__epochs=20, **settings)
    run.begin(2)
    run.finish()
    expected, _ = plain_losses(run.script, run.settings)
    found = losses(run.output)
    assert found[-1] < found[0] / 2
    assert found[-1] == pytest.approx(expected[-1], rel=0.5)
    assert run.events("verified")


@pytest.mark.parametrize(
    ("hang", "reason"),
    [
        ("CDLL(None).pause()", "its shard missed the step's deadline"),
        ("PyDLL(None).sleep(10000)", "silent for 3 s"),
    ],
    ids=["in C", "in C with Python's lock"],
)
def test_a_worker_whose_script_hangs_is_lost_and_its_samples_are_redealt(
    run: Scripted, hang: str, reason: str
) -> None:
    """One worker hangs in C, where no signal is handled; with the lock it sends no heartbeat."""
    run.prepare(training__epochs=40, exchange__step_deadline=2.0 if "pause" in hang else 60.0)
    change = (
        "CALLS = []\n\ndef loss(model, samples):\n"
        "    import ctypes, os, signal\n"
        "    CALLS.append(os.environ.get('HANGS'))\n"
        "    if CALLS.count('1') == 20:\n"
        "        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        f"        ctypes.{hang}\n"
    )
    text = run.script.read_text()
    run.script.write_text(text.replace("def loss(model, samples):\n", change))
    coordinator = run.coordinator(2, *run.named)
    good = run.torch_worker(0, *CPU, *run.named)
    hung = run.torch_worker(1, *CPU, *run.named, HANGS="1")
    assert run.wait_event("lost", rank=1)["reason"] == reason
    assert run.wait_event("reassigned", rank=1)["ranks"] == [0]
    assert coordinator.wait(PATIENCE) == 0, coordinator.text
    assert good.wait(PATIENCE) == 0, good.text
    assert hung.running
    assert len(run.events("lost")) == 1  # its network thread does not join for it
    hung.kill()
    expected, _ = plain_losses(run.script, run.settings)
    assert len(losses(run.output)) == len(expected)


def test_a_script_that_hangs_ends_every_process_in_one_line(run: Scripted) -> None:
    """In `loss` a worker, in `model` the coordinator's child and with it the coordinator."""
    run.prepare(exchange__join_deadline=3.0)
    text = run.script.read_text()
    run.script.write_text(
        text.replace("    return F.mse", "    while True: pass\n    return F.mse")
    )
    coordinator = run.coordinator(1, *run.named)
    worker = run.torch_worker(0, *CPU, *run.named)
    assert worker.wait(PATIENCE) == 3, worker.text
    assert f"{run.script}:17: loss: has not returned for 3 s" in worker.text
    assert "Traceback" not in worker.text
    assert coordinator.wait(PATIENCE) == 3, coordinator.text
    assert "rank 0 did not join within 3 s" in coordinator.text
    run.script.write_text(text.replace("def model():", "def model():\n    while True: pass"))
    process = run.coordinator(1, *run.named, listening=False)
    assert process.wait(PATIENCE) == 3, process.text
    assert f"{run.script}:7: model: has not returned for 3 s" in process.text
    assert "Traceback" not in process.text


def test_a_script_that_differs_between_hosts_is_refused_at_the_join(run: Scripted) -> None:
    """Another script, or the same whose data or frozen weights are others on another host."""
    run.prepare()
    elsewhere = "len(__import__('os').environ.get('ELSEWHERE', ''))"
    text = run.script.read_text().replace("len(split))", f"len(split) + {elsewhere})")
    run.script.write_text(text.replace("    frozen", f"    torch.rand({elsewhere})\n    frozen"))
    run.coordinator(1, *run.named)
    other = run.folder / "other.py"
    other.write_text(run.script.read_text() + "#")
    named = ("--script", str(other))
    for flags, environment in ((named, {}), (run.named, {"ELSEWHERE": "1"})):
        worker = run.torch_worker(0, *CPU, *flags, **environment)
        assert worker.wait(PATIENCE) == 4, worker.text
        assert "model or script differs" in worker.text
        assert "Traceback" not in worker.text


def test_a_script_that_is_wrong_ends_coordinator_and_worker_alike(run: Scripted) -> None:
    run.prepare()
    text = run.script.read_text()
    run.script.write_text(text.replace("def model():", "def model():\n    {}['x']\n"))
    process = run.coordinator(1, *run.named, listening=False)
    assert process.wait(PATIENCE) == 2
    assert "train.py:7: model: KeyError: 'x'" in process.text
    assert "Traceback" not in process.text
