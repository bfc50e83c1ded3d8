"""Who is told of a run's events, with the fault of each event injected; by a real command."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.trainer.tiny_run import tiny_config
from tests.trainer.tracking.test_run_recorder import StuckStore, recorder_of
from tests.waiting import wait_for
from trainer.exchange.protocol.actions import Step
from trainer.run.composition.roles import guard_run
from trainer.system.errors import (
    BudgetStopError,
    InputError,
    NonFiniteError,
    StorageError,
    UnreachableError,
)
from trainer.system.process.child import SAVING_VARIABLE
from trainer.system.process.notification import run_notify_command
from trainer.tracking.notifier import Notifier
from trainer.tracking.run_recorder import RunRecorder
from trainer.tracking.status import STATUS_FILE, read_status

HOSTILE = "no heartbeat\n'; touch pwned; $(touch pwned) \x1b[2J"
QUIET = tiny_config(tracking=())
Told = Callable[[], list[dict[str, Any]]]


def writing(path: Path) -> list[str]:
    """Return a command that appends what it gets on stdin to a file."""
    return ["sh", "-c", 'cat >> "$0"', str(path)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "told.jsonl"


@pytest.fixture
def notifier(log: Path, tmp_path: Path) -> Iterator[Notifier]:
    made = Notifier(writing(log), "run", str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def recorder(notifier: Notifier, tmp_path: Path) -> RunRecorder:
    store = StuckStore()
    store.free.set()
    return recorder_of(store, tmp_path / "output", QUIET, notifier)


@pytest.fixture
def told(notifier: Notifier, log: Path) -> Told:
    """Return what reads the events, once all are told."""

    def read() -> list[dict[str, Any]]:
        notifier.close()
        return [json.loads(line) for line in log.read_text().splitlines()]

    return read


def step(number: int, seconds: float = 0.1) -> Step:
    return Step(
        step=number,
        epoch=0,
        generation=0,
        loss=0.5,
        learning_rate=1e-3,
        grad_norm=1.0,
        seconds=seconds,
        tokens_per_second=10.0,
        exchange_ms=40.0,
        exchange_exposed_ms=8.0,
        worker_tokens_per_second={0: 10.0},
        sample_ranges=[[0, 0, 10]],
    )


def test_an_end_is_told_with_what_a_person_wants_to_know(
    recorder: RunRecorder, told: Told, tmp_path: Path
) -> None:
    recorder.log_step(step(10))
    recorder.close(0, "all steps are done")
    (event,) = told()
    assert event["schema"] == "motley.notify/2"
    assert (event["event"], event["run_id"], event["exit_code"]) == ("completed", "run", 0)
    assert (event["step"], event["total_steps"], event["loss"]) == (10, 10, 0.5)
    assert event["output"] == str(tmp_path)
    assert event["text"] == "run has completed at step 10 of 10, loss 0.5: all steps are done"


@pytest.mark.parametrize(
    ("code", "event"), [(0, "stopped"), (6, "failed"), (BudgetStopError.exit_code, "budget")]
)
def test_every_other_end_has_its_name(
    recorder: RunRecorder, told: Told, code: int, event: str
) -> None:
    recorder.log_step(step(3))
    recorder.close(code, "a reason")
    assert [(e["event"], e["reason"]) for e in told()] == [(event, "a reason")]


def test_nan_is_told_as_nan(recorder: RunRecorder, told: Told) -> None:
    with suppress(NonFiniteError), recorder.closed_on_failure():
        raise NonFiniteError.at_step(4, "loss of rank 0")
    (event,) = told()
    assert event["event"] == "nan"
    assert "step 4: loss of rank 0" in event["text"]


def test_a_lost_host_and_its_return_are_told_as_data(
    recorder: RunRecorder, told: Told, tmp_path: Path
) -> None:
    who = {"rank": 1, "host": "b", "device": "cpu", "backend": "cpu", "backend_reason": ""}
    recorder.emit({"event": "joined", **who})
    recorder.emit({"event": "lost", "rank": 1, "reason": HOSTILE, "generation": 1})
    recorder.emit({"event": "rejoined", **who})
    recorder.emit({"event": "stopping", "reason": "SIGTERM"})
    recorder.emit({"event": "lost", "rank": 1, "reason": "it left", "generation": 2})
    lost, back = told()
    assert (lost["event"], lost["rank"], lost["worker_host"]) == ("lost", 1, "b")
    assert lost["reason"] == HOSTILE
    assert "\n" not in lost["text"]
    assert "\x1b" not in lost["text"]
    assert (back["event"], back["worker_host"]) == ("rejoined", "b")
    assert not list(tmp_path.rglob("pwned"))


def test_a_killed_run_that_resumes_says_so(recorder: RunRecorder, told: Told) -> None:
    """kill -9 leaves no time to tell; its supervisor starts the next attempt."""
    recorder.log_step(step(4))
    recorder.emit({"event": "resumed", "step": 3, "path": "step-000003"})
    assert [(e["event"], e["step"], e["reason"]) for e in told()] == [
        ("resumed", 3, "from step-000003")
    ]


def test_a_failure_before_the_first_step_is_told_and_only_once(log: Path, tmp_path: Path) -> None:
    config = tiny_config(output=str(tmp_path / "output"))
    with pytest.raises(InputError), guard_run(config, "run", writing(log)):
        raise InputError("data.train: cannot be read")
    with suppress(StorageError), guard_run(config, "run", writing(log)) as guards:
        assert guards.notifier is not None
        guards.notifier.notify_end("failed", "the disk is full", StorageError.exit_code)
        raise StorageError("the disk is still full")
    reasons = [json.loads(line)["reason"] for line in log.read_text().splitlines()]
    assert reasons == ["data.train: cannot be read", "the disk is full"]


def test_a_failure_that_a_supervisor_mends_is_not_told(
    notifier: Notifier, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SAVING_VARIABLE, "/somewhere")
    notifier.notify_end("failed", "the peer was lost", UnreachableError.exit_code)
    notifier.close()
    assert not log.exists()


def test_a_stall_is_told_once_with_what_it_waits_for_and_then_its_end(
    log: Path, tmp_path: Path
) -> None:
    notifier = Notifier(writing(log), "run", str(tmp_path), stalled=0.05)
    recorder = recorder_of(StuckStore(), tmp_path / "output", QUIET, notifier)
    recorder.emit({"event": "waiting", "reason": "for shard 3"})
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "the stall")
    recorder.log_step(step(1, seconds=3600.0))  # no stall for ten hours
    notifier.close()
    stalled, recovered = [json.loads(line) for line in log.read_text().splitlines()]
    assert stalled["event"] == "stalled"
    assert stalled["reason"].endswith(": for shard 3")
    assert recovered["event"] == "recovered"


def test_a_command_that_hangs_delays_no_step_and_the_end_a_bounded_time(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def hang(_command: object, _event: object, **_options: object) -> None:
        begun.set()
        release.wait()

    notifier = Notifier(["true"], "run", str(tmp_path), run=hang)
    recorder = recorder_of(StuckStore(), tmp_path / "output", QUIET, notifier)
    recorder.emit({"event": "resumed", "step": 0, "path": "x"})
    assert begun.wait(60)
    for number in range(1, 200):
        recorder.emit({"event": "resumed", "step": number, "path": "x"})  # more than may wait
    recorder.log_step(step(200))
    began = time.monotonic()
    notifier.close(wait=0.05)
    assert time.monotonic() - began < 30
    release.set()


def test_a_command_that_fails_is_logged_and_in_the_last_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tries take longer than the end of a run waits."""
    retried = threading.Event()

    def run(*call: Any, report: Callable[[str], object]) -> str | None:
        return run_notify_command(*call, report=report, pause=lambda _: retried.wait(60))

    notifier = Notifier(["false"], "run", str(tmp_path), run=run)
    store = StuckStore()
    store.free.set()
    recorder = recorder_of(store, tmp_path / "output", QUIET, notifier)
    recorder.emit({"event": "resumed", "step": 3, "path": "step-000003"})
    wait_for(lambda: notifier.failure is not None, "the first try")
    failure = "resumed: false: exit code 1"
    assert f"notification failed: {failure}; trying again" in caplog.text
    recorder.emit({"event": "verified"})
    assert read_status(tmp_path / "output" / STATUS_FILE)["notify_failure"] == failure
    retried.set()
    recorder.close(0, "stopped by SIGTERM")
    last = read_status(tmp_path / "output" / STATUS_FILE)
    assert (last["state"], last["notify_failure"]) == ("stopped", "stopped: false: exit code 1")


def test_a_command_that_works_again_has_not_failed(tmp_path: Path) -> None:
    tries = f"echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) = 3 ]"
    paused: list[float] = []
    run = partial(run_notify_command, pause=paused.append)
    notifier = Notifier(["sh", "-c", tries], "run", str(tmp_path), run=run)
    notifier.notify("lost")
    notifier.close()
    assert (notifier.failure, paused) == (None, [1.0, 5.0])


def test_a_try_has_a_time_limit_with_all_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # else the open waits for a writer
    event = {"event": "failed", "run_id": "run", "text": "t"}
    command = ["sh", "-c", f"sleep 1000 > {pipe} & sleep 1000"]
    failure = run_notify_command(command, event, time_limit=1.0, pauses=())
    assert failure == "not finished within 1 s"
    os.set_blocking(reading, True)
    with os.fdopen(reading, "rb") as end:
        assert end.read() == b""  # there is no writer left, or this would wait


def test_it_is_tried_again_with_longer_pauses(tmp_path: Path) -> None:
    paused: list[float] = []
    event = {"event": "failed", "run_id": "run", "text": "t"}
    tries = f"echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) = 3 ]"
    assert run_notify_command(["sh", "-c", tries], event, pause=paused.append) is None
    assert paused == [1.0, 5.0]
    assert run_notify_command(["false"], event, pauses=(0,)) == "exit code 1"
    assert run_notify_command([str(tmp_path)], event, pauses=()) == "Permission denied"


def test_one_liners_have_the_event_in_variables(tmp_path: Path) -> None:
    event = {"event": "failed", "run_id": "run-1", "text": '-d "x" $(id)'}
    out = tmp_path / "out"
    script = 'printf "%s|%s|%s" "$MOTLEY_EVENT" "$MOTLEY_RUN" "$MOTLEY_TEXT" > "$0"'
    assert run_notify_command(["sh", "-c", script, str(out)], event) is None
    assert out.read_text() == 'failed|run-1|-d "x" $(id)'


def test_the_documented_one_liners_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs that write down their arguments and stdin."""
    page = (ROOT / "docs/notifications.md").read_text(encoding="utf-8")
    lines = re.findall(r"^command: .*$", page, re.MULTILINE)
    programs = ("curl", "mail", "notify-send")
    assert len(lines) == len(programs)
    for name in programs:
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {program}.got\ncat >> {program}.got\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = "run-1 has failed: it says $(id) 'here'"
    event = {"event": "failed", "run_id": "run-1", "text": text}
    for line, name in zip(lines, programs, strict=True):
        command = yaml.safe_load(line)["command"]
        assert run_notify_command(command, event, pauses=()) is None
        got = (tmp_path / f"{name}.got").read_text()
        assert text in got.splitlines()
        assert "failed" in got


def test_a_program_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    config = tiny_config(output=str(tmp_path / "output"))
    absent = pytest.raises(InputError, match="notify: program crul not found")
    with absent, guard_run(config, "r", ("crul", "-d", "x")):
        raise AssertionError("not reached")
