"""`trainer finetune --distributed` as real processes: by hand, and by torchrun."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from launcher.cli import run as launch
from tests.cluster.by_hand import Hands, typed
from tests.cluster.real_process import Process
from tests.ports import free_port
from tests.project.command_blocks import command_block
from tests.trainer.small_model import write_data, write_hollow_weights, write_model
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture
def hands(tmp_path: Path, model: Path, data: Path) -> Iterator[Hands]:
    made = Hands(tmp_path, model, data)
    yield made
    for process in made.started:
        process.end()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "model", data)


def test_sigterm_on_one_rank_saves_and_ends_all_and_the_run_goes_on(hands: Hands) -> None:
    steps = ("--max-steps", "100000", "--batch-size", "4")
    both = [hands.rank(number, *steps) for number in range(2)]
    wait_for(lambda: hands.status["step"] >= 2, "two steps")
    both[1].signal(signal.SIGTERM)
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    status = hands.status
    assert (status["state"], status["exit_code"]) == ("stopped", 0)
    assert [worker["rank"] for worker in status["workers"]] == [0, 1]
    assert status["checkpoint"]["step"] == status["step"]

    hands.port = free_port()
    again = [hands.rank(number, *steps) for number in range(2)]
    wait_for(lambda: hands.status["step"] > status["step"], "a further step")
    again[0].signal(signal.SIGTERM)
    assert [process.wait() for process in again] == [0, 0]
    assert f'"event": "resumed", "step": {status["step"]}' in (
        (hands.output / "metrics.jsonl").read_text()
    )


def test_the_budget_guard_ends_all_ranks_and_a_higher_ceiling_goes_on(hands: Hands) -> None:
    """Its next checkpoint is a million steps away, which after two steps is seen to cost more.

    They save their parts; a whole checkpoint is in the test of torchrun and a budget.
    """
    host = {"name": "here", "price_hour": 3.6}
    budget = {"ceiling": 2.0, "currency": "EUR", "hosts": [host]}
    saves = {"every": 1_000_000, "sharded": True}
    config = hands.folder / "run.yaml"
    config.write_text(json.dumps({"budget": budget, "checkpoint": saves}))
    steps = ("--config", str(config), "--max-steps", "1000000", "--batch-size", "4")
    both = [hands.rank(number, *steps) for number in range(2)]
    assert [process.wait() for process in both] == [9, 9], both[0].text + both[1].text
    status = hands.status
    assert (status["state"], status["exit_code"]) == ("stopped", 9)
    assert "the checkpoint of step 1000000 would make it" in status["reason"]
    assert status["checkpoint"]["step"] == status["step"] >= 2
    assert status["budget"]["spent"] < 1
    assert "Traceback" not in both[0].text + both[1].text

    hands.port = free_port()
    more = (*steps, "--set", "budget.ceiling=1000000")
    again = [hands.rank(number, *more) for number in range(2)]
    wait_for(lambda: hands.status["step"] > status["step"], "a further step")
    again[0].signal(signal.SIGTERM)
    assert [process.wait() for process in again] == [0, 0], again[0].text + again[1].text
    lines = (hands.output / "spend.jsonl").read_text().splitlines()
    spent = [json.loads(line) for line in lines]
    assert sum(line["cost"] for line in spent) == pytest.approx(
        hands.status["budget"]["spent"], abs=1e-5
    )
    assert [line["step"] for line in spent if line.get("is_final")] == [
        status["step"],
        hands.status["step"],
    ]
    assert hands.status["budget"]["spent"] > status["budget"]["spent"]


def test_a_rank_that_hangs_ends_the_others_in_one_line(hands: Hands) -> None:
    """Killed ones are in tests/trainer/run/distributed/test_rank_watchdog.py, with other faults."""
    steps = ("--max-steps", "100000", "--batch-size", "4")
    both = [hands.rank(rank, *steps, "--set", "parallel.timeout=20") for rank in range(2)]
    wait_for(lambda: hands.status["step"] >= 2, "two steps")
    both[1].signal(signal.SIGSTOP)
    assert both[0].wait() == 3, both[0].text
    host = os.uname().nodename
    says = f"no heartbeat from rank 1 on {host} (killed, stopped or cut off)"
    assert f"trainer: rank 0 on {host}: a collective " in both[0].text
    assert says in both[0].text, both[0].text
    assert (hands.status["state"], hands.status["exit_code"]) == ("failed", 3)
    assert says in hands.status["reason"]
    assert "Traceback" not in both[0].text
    assert (hands.output / "flight-recorder/rank-0.json").exists()


def test_a_rank_that_runs_out_of_memory_is_named_and_ends_the_others(hands: Hands) -> None:
    """Its limit is met while it reads the model: a table of 256 MB, which is a hole on the disk."""
    folder = hands.folder / "wide"
    shutil.copytree(hands.model, folder)
    tree = json.loads((folder / "config.json").read_text()) | {"vocab_size": 2_000_000}
    (folder / "config.json").write_text(json.dumps(tree))
    hands.model = write_hollow_weights(folder)
    short = hands.rank(1)
    used = next(
        int(line.split()[1]) << 10
        for line in Path(f"/proc/{short.pid}/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.prlimit(short.pid, resource.RLIMIT_DATA, (used + (200 << 20), limits[1]))
    whole = hands.rank(0)
    assert short.wait() == 2, short.text
    assert whole.wait() == 2, "another attempt cannot succeed: " + whole.text
    host = os.uname().nodename
    said = f"rank 1 on {host}: cpu is out of memory; lower training.micro_batch_size or"
    assert f"trainer: {said} data.max_seq_len, or shard the model" in short.text, short.text
    assert f"rank 1 on {host} has failed: cpu is out of memory. Look" in whole.text
    assert "Traceback" not in short.text + whole.text


def test_a_rank_with_other_weights_is_named_and_nothing_is_written(hands: Hands) -> None:
    """With other data, settings or torch: tests/trainer/run/distributed/test_rank_reports.py."""
    folder = write_model(hands.folder / "other", hands.data, seed=1)
    both = [hands.rank(0), hands.rank(1, "--set", f"model.path={folder}")]
    for process in both:
        assert process.wait() == 4, process.text
        says = f"rank 1 on {os.uname().nodename}: its model differs from that of rank 0"
        assert says in process.text, process.text
        assert "Traceback" not in process.text
    assert not (hands.output / "checkpoints").exists()


def test_a_missing_rank_is_named(hands: Hands) -> None:
    alone = hands.rank(0, "--set", "exchange.join_deadline=2")
    assert alone.wait() == 3, alone.text
    assert "trainer: rank 0 waited 2 s for rank 1 of 2: start the missing ranks" in alone.text
    late = hands.rank(1, "--set", "exchange.join_deadline=2")
    assert late.wait() == 3, late.text
    assert f"trainer: rank 1 cannot reach rank 0 at 127.0.0.1:{hands.port}: " in late.text
    assert "Traceback" not in alone.text + late.text


def test_layers_of_transformers_are_not_divided(hands: Hands) -> None:
    """They are trained, in tests/trainer/replica/torch/parallel/test_families.py."""
    folder = hands.folder / "gelu"
    shutil.copytree(hands.model, folder)
    tree = json.loads((folder / "config.json").read_text())
    tree["hidden_act"] = "gelu"
    (folder / "config.json").write_text(json.dumps(tree))
    hands.model = folder
    both = [hands.rank(number, "--set", "parallel.tensor=2") for number in range(2)]
    for process in both:
        assert process.wait() == 2, process.text
        assert "which tensor parallelism and pipelines do not divide" in process.text
        assert "Traceback" not in process.text
    assert not (hands.output / "checkpoints").exists()


def test_what_rank_0_finds_in_the_output_folder_ends_all(hands: Hands) -> None:
    both = [hands.rank(number, "--max-steps", "2") for number in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].text
    hands.port = free_port()
    both = [hands.rank(number, "--max-steps", "2", "--run-id", "x") for number in range(2)]
    for process in both:
        assert process.wait() == 2, process.text
        assert "contains the checkpoints of run run; give another -o" in process.text
        assert "Traceback" not in process.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "parallel.tensor=2"], "2 does not divide the world of 3 processes"),
        (["--set", "parallel.tensor=3"], "parallel.tensor 3 does not divide its 4 attention heads"),
        (["--role", "worker"], "--distributed: there is no coordinator, so no --role worker"),
    ],
)
def test_refusals_come_before_ranks_wait_for_each_other(
    hands: Hands, options: list[str], message: str
) -> None:
    alone = hands.rank(0, *options, world=3)
    assert alone.wait() == 2, alone.text
    assert message in alone.text
    assert not hands.output.exists()


def test_a_port_that_is_taken_is_named(hands: Hands) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        hands.port = other.getsockname()[1]
        alone = hands.rank(0)
        assert alone.wait() == 2, alone.text
    assert f"trainer: rank 0 cannot listen on 127.0.0.1:{hands.port}: " in alone.text
    assert "Traceback" not in alone.text


@pytest.mark.long
def test_killed_ranks_resume_from_their_parts_under_another_strategy(hands: Hands) -> None:
    steps = ("--max-steps", "60", "--set", "checkpoint.every=50")
    sharded = (*steps, "--set", "checkpoint.sharded=true")
    often = (*sharded, "--set", "checkpoint.every=2")
    both = [hands.rank(number, *often) for number in range(2)]
    wait_for(lambda: (hands.status.get("checkpoint") or {}).get("step", 0) >= 2, "a checkpoint")
    for process in both:
        process.signal(signal.SIGKILL)
    for process in both:
        process.wait()
    assert not list((hands.output / "checkpoints").glob("step-*")), "nothing was gathered"

    both = [hands.rank(number, *sharded, "--set", "parallel.data=fsdp") for number in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    disturbed = hands.output
    assert '"event": "resumed"' in (disturbed / "metrics.jsonl").read_text()
    assert "Traceback" not in both[0].text + both[1].text

    hands.output, hands.port = hands.folder / "undisturbed", free_port()
    both = [hands.rank(number, *steps) for number in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    # A step that was done again counts once, as last done.
    curves = [dict(losses(output)) for output in (disturbed, hands.output)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    assert len(curves[0]) == 60
    adapters = [
        load_file(output / "checkpoints" / "latest" / "adapter_model.safetensors")
        for output in (disturbed, hands.output)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    for name, values in adapters[1].items():
        assert adapters[0][name] == pytest.approx(values, abs=1e-4), name


def losses(output: Path) -> list[tuple[int, float]]:
    """Return step and loss of every line."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def test_saving_in_parts_without_ranks_is_refused(hands: Hands) -> None:
    options = [word for word in hands.options() if word != "--distributed"]
    command = [sys.executable, *options, "--set", "checkpoint.sharded=true"]
    hands.started.append(Process("alone", command, hands.folder, {"NO_COLOR": "1"}))
    assert hands.started[0].wait() == 2
    assert hands.started[0].text.splitlines() == [
        "trainer: checkpoint.sharded: only the ranks of --distributed have parts to save; leave it"
        " out, or start with --distributed"
    ]
    assert not hands.output.exists()


@pytest.mark.long
def test_torchrun_does_not_restart_what_its_budget_has_stopped(hands: Hands) -> None:
    host = {"name": "here", "price_hour": 3.6}
    config = hands.folder / "run.yaml"
    budget = {"ceiling": 2.0, "currency": "EUR", "hosts": [host]}
    tree = {"num_classes": 3, "budget": budget, "checkpoint": {"every": 1_000_000}}
    config.write_text(json.dumps(tree))
    text = command_block("docs/strategies.md", "Two processes on one machine").text
    torchrun = typed(hands, text, f"--config {config} --max-steps 1000000 --batch-size 4")
    hands.output = hands.folder / "outputs/two"
    assert torchrun.wait() == 0, torchrun.text
    assert (hands.status["state"], hands.status["exit_code"]) == ("stopped", 9)
    lines = (hands.output / "spend.jsonl").read_text().splitlines()
    spent = [json.loads(line) for line in lines]
    assert len([line for line in spent if not line["seconds"]]) == 1, "one attempt"
    assert sum(line["cost"] for line in spent) == pytest.approx(
        hands.status["budget"]["spent"], abs=1e-5
    )


@pytest.mark.long
def test_the_line_of_launch_plan(hands: Hands, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is printed, with two processes on CPUs in the place of two cards."""
    assert launch(["plan", "--model", str(hands.model), "--cluster", "2xRTX4090"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].strip()
    assert line.startswith("torchrun --nproc-per-node 2 -m trainer finetune --distributed ")
    less = f"--num-classes 3 --max-steps 1 --threads 1 -o {hands.output}"
    torchrun = typed(hands, line.replace("--data FILE", "--data data.jsonl"), less)
    assert torchrun.wait() == 0, torchrun.text
    assert (hands.status["state"], hands.status["step"]) == ("completed", 1)
    assert [worker["rank"] for worker in hands.status["workers"]] == [0, 1]
    assert "Warning" not in torchrun.text


@pytest.mark.long
def test_the_documents_torchrun_restarts_what_crashes(hands: Hands) -> None:
    """As a reader types it, on less data; a process is killed on the way."""
    text = command_block("docs/strategies.md", "Two processes on one machine").text
    torchrun = typed(hands, text, "--max-steps 25 --set checkpoint.every=1")
    hands.output = hands.folder / "outputs/two"
    wait_for(lambda: (hands.status.get("checkpoint") or {}).get("step", 0) >= 2, "a checkpoint")
    workers = [
        process
        for process in psutil.Process(torchrun.pid).children(recursive=True)
        if "--distributed" in process.cmdline() and "torchrun" not in process.cmdline()[1]
    ]
    assert len(workers) == 2
    workers[1].kill()
    assert torchrun.wait() == 0, torchrun.text
    assert (hands.status["state"], hands.status["step"]) == ("completed", 25)
    metrics = (hands.output / "metrics.jsonl").read_text()
    assert metrics.count('"event": "resumed"') == 1
    assert (hands.output / "checkpoints/latest/adapter_model.safetensors").exists()
    assert "Traceback" not in torchrun.text
    assert "Warning" not in torchrun.text


@pytest.mark.long
def test_the_documents_pipeline(hands: Hands) -> None:
    """As a reader types it, on less data."""
    torchrun = typed(hands, command_block("docs/strategies.md", "Pipelines").text, "--max-steps 3")
    assert torchrun.wait() == 0, torchrun.text
    hands.output = hands.folder / "outputs/pipeline"
    assert (hands.status["state"], hands.status["step"]) == ("completed", 3)
    assert (hands.output / "checkpoints/latest/adapter_model.safetensors").exists()
    assert "Warning" not in torchrun.text
