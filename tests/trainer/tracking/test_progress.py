import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.clock import Clock
from trainer.tracking.progress import (
    GuardedView,
    LiveView,
    PlainView,
    StepTimes,
    open_view,
    show_lines,
)
from trainer.tracking.progress_picture import format_duration


def status(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "run_id": "demo-1",
        "state": "running",
        "reason": None,
        "step": step,
        "total_steps": 100,
        "epoch": 0,
        "loss": 1.25,
        "learning_rate": 5e-5,
        "tokens_per_second": 12345.6,
        "unit": "tokens",
        "expect_workers": 2,
        "workers": [worker(0, "active"), worker(1, "lost")],
        "checkpoint": None,
        "validation": None,
    }
    return {**values, **changes}


def worker(rank: int, state: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": "lambda",
        "device": "[gpu:0000:01:00.0]",  # square brackets are not markup
        "backend": "cuda",
        "backend_reason": "",
        "state": state,
        "samples": 7,
        "step_seconds": 0.5,
        "tokens_per_second": None,
    }


def logged(stream: io.StringIO) -> list[str]:
    """Return a log's lines without their times, which all of them have."""
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines), lines
    return [line.partition(" ")[2] for line in lines]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_for_each_interval_and_for_the_last_step():
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, interval=1.0, clock=clock)
    for step in range(1, 101):
        clock.now = 0.25 * step
        view.show_status(status(step, loss=None if step == 5 else 1.25))
    lines = logged(stream)
    assert lines[0] == "step 1/100  loss 1.2500  lr 5.00e-05  12,346 tokens/s  1/2 workers"
    assert lines[1].startswith("step 5/100  loss -  lr 5.00e-05")
    assert lines[1].endswith("0:24 left")
    assert lines[-1].startswith("step 100/100")
    assert len(lines) == 26


def test_the_speed_of_a_script_is_in_samples() -> None:
    stream = Terminal()
    view = LiveView(stream)
    view.show_status(status(1, unit="samples", workers=[worker(0, "active")]))
    view.close()
    assert "12,346 samples/s" in stream.getvalue()
    assert "SAMPLES/S" in stream.getvalue()


def test_changes_of_state_validation_and_events_are_told_at_once():
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, clock=clock)
    waiting = status(0, state="waiting", loss=None, learning_rate=None, tokens_per_second=None)
    view.show_status(waiting)
    view.show_status(waiting)
    clock.now = 60.0
    view.show_status(status(1))
    view.show_event("lost", 1, rank=1, reason="no heartbeat for 3.0 s")
    view.show_event("checkpoint", 1, path="step-000001")
    reason = "cuda: there is no NVIDIA driver"
    who = {"rank": 1, "host": "lambda", "device": "cpu", "backend": "cpu", "transport": ""}
    view.show_event("rejoined", 1, **who, backend_reason=reason, generation=3)
    scored = {"step": 2, "loss": 0.5, "accuracy": 0.875, "mcc": 0.75}
    view.show_status(status(2, validation=scored))
    view.show_status(status(2, state="failed", reason="NaN in block 3", validation=scored))
    assert logged(stream) == [
        "step 0/100  1/2 workers  waiting",
        "step 1/100  loss 1.2500  lr 5.00e-05  12,346 tokens/s  1/2 workers",
        "step 1: rank 1 lost: no heartbeat for 3.0 s",
        "step 1: checkpoint path=step-000001",
        "step 1: rank 1 rejoined: cpu on lambda",
        "step 2: validation loss 0.5000  accuracy 0.875  MCC 0.750",
        "step 2/100  loss 1.2500  lr 5.00e-05  12,346 tokens/s  1/2 workers"
        "  failed: NaN in block 3",
    ]


def live(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    view = open_view(stream)
    view.show_event("joined", 0, rank=0)
    view.show_status(status(50, validation={"step": 40, "loss": 0.5, "accuracy": 0.9, "mcc": 0.8}))
    view.close()
    return stream.getvalue()


def test_the_live_view_has_a_row_for_each_worker(monkeypatch: pytest.MonkeyPatch):
    shown = live(monkeypatch)
    for text in ("step 50/100", "[gpu:0000:01:00.0]", "lost", "rank 0 joined", "MCC 0.800"):
        assert text in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"NAME +HOST +DEVICE +STATE +BATCH +TOKENS/S", plain), "as launch status"
    assert re.search(r"worker-0 +lambda +\[gpu:0000:01:00.0\] +active +100 % +-", plain)
    assert re.search(r"worker-1 .* lost +- +-", plain), "a lost worker has no share"
    assert "1 of 2 workers" in plain
    assert "\x1b[32m" in shown, "active is green"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_live_view_breaks_no_word_and_fits(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    scores = {"step": 40, "loss": 0.5, "accuracy": 0.9, "mcc": 0.8}
    stream = Terminal()
    view = LiveView(stream)
    for step in range(1, 60):
        view.show_status(status(step, loss=3.0 / step, validation=scores, exchange_ms=40.0))
    view.show_status(status(60, state="completed", reason="done", validation=scores))
    view.close()
    last = stream.getvalue().rpartition("demo-1")[2]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "completed", "not `completed: done`"
    words = {word for line in lines for word in line.split()}
    assert {"1.2500", "5.00e-05", "12,346", "tokens/s", "validation", "accuracy"} <= words
    assert any(line.startswith("loss █") for line in lines), "a curve with its scale"


def test_a_card_is_wrapped_between_words_and_its_commands_stay_commands(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    command = "  trainer evaluate 'my output' --data data/train.jsonl --held-out"
    show_lines(["to publish: out/adapter (with tokenizer and model card)", "next:", command])
    assert terminal.getvalue().splitlines() == [
        "to publish: out/adapter (with tokenizer",
        "  and model card)",
        "next:",
        "  trainer evaluate 'my output' --data \\",
        "      data/train.jsonl --held-out",
    ]
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    show_lines(["next:", command])
    assert logged(log) == ["next:", command], "whole in a log, with the time that all lines have"


def test_the_live_view_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    view = open_view(stream)
    sys.stdout.write('{"data": 1}\n')
    view.close()
    assert capsys.readouterr().out == '{"data": 1}\n'
    assert "data" not in stream.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch):
    shown = live(monkeypatch, NO_COLOR="1")
    assert "step 50/100" in shown
    assert "\x1b[32m" not in shown
    assert "38;" not in shown


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch):
    assert "\x1b" not in live(monkeypatch, TERM="dumb")


class Broken(io.StringIO):
    def __init__(self, error: Exception, terminal: bool) -> None:
        super().__init__()
        self.error, self.terminal, self.calls, self.armed = error, terminal, 0, False

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.calls += 1
        if self.armed:
            raise self.error
        return len(text)


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed"), OSError(5, "EIO")])
@pytest.mark.parametrize("make", [PlainView, LiveView])
def test_a_view_that_fails_is_dropped(
    make: Callable[..., Any],
    error: Exception,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one rich draws at the end alone
    stream = Broken(error, terminal=make is LiveView)
    view = GuardedView(make(stream))
    stream.armed = True
    view.show_status(status(1))
    calls = stream.calls
    view.show_status(status(2, state="completed"))
    view.show_event("lost", 2, rank=0)
    view.close()
    assert stream.calls == calls, "not tried again"
    assert caplog.text.count("progress is no longer shown") == 1


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("completed", "done", "workers  completed"),
        ("stopped", "stopped by SIGTERM", "workers  stopped by SIGTERM"),
        ("failed", "NaN in the loss", "failed: NaN in the loss"),
        ("waiting", None, "workers  waiting"),
    ],
)
def test_an_end_is_called_what_it_is(state: str, reason: str | None, said: str):
    stream = io.StringIO()
    open_view(stream).show_status(status(2, state=state, reason=reason))
    assert stream.getvalue().endswith(f"{said}\n")


def test_a_wrong_status_does_not_stop_training(caplog: pytest.LogCaptureFixture):
    view = open_view(io.StringIO())
    view.show_status({})
    view.show_status(status(1))
    view.close()
    assert "progress is no longer shown" in caplog.text


def test_pace_survives_a_resume():
    clock = Clock()
    pace = StepTimes(clock)
    assert pace.estimate_seconds_left(10) is None
    for step in (5, 6, 7):
        clock.now += 2.0
        pace.observe_step(step)
    assert pace.estimate_seconds_left(10) == 6.0
    pace.observe_step(3)
    assert pace.estimate_seconds_left(10) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (95, "1:35"), (3700, "1:01:40"), (59.7, "1:00")]
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text
