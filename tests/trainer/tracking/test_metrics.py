import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.exchange.protocol.actions import Step
from trainer.tracking.metrics import MetricsLog, read_metrics
from trainer.tracking.trackers.tensorboard_file import TensorBoardFile


def with_board(output: Path, on_alarm: Callable[[str], None] = print) -> MetricsLog:
    board = TensorBoardFile(output / "tensorboard", on_alarm)
    return MetricsLog(output, [board], on_alarm=on_alarm)


def metrics(step: int, **changes) -> Step:
    values = {
        "step": step,
        "epoch": 0,
        "generation": 2,
        "loss": 1.5 / step,
        "learning_rate": 1e-4,
        "grad_norm": 0.75,
        "seconds": 0.1,
        "tokens_per_second": 300.0,
        "exchange_ms": 12.5,
        "exchange_exposed_ms": 2.5,
        "exchange_bytes": 4096,
        "worker_tokens_per_second": {0: 100.0, 1: 200.0},
        "worker_seconds": {0: 0.05, 1: 0.0975},
        "sample_ranges": [[0, 0, 5], [1, 5, 16]],
    }
    return Step(**{**values, **changes})


def test_a_step_is_one_line(tmp_path: Path):
    log = MetricsLog(tmp_path / "new", clock=lambda: 1700000000.1234)
    log.record_step(metrics(1))
    log.record_event("lost", 1, rank=1, reason="no heartbeat for 3.0 s")
    log.record_validation(1, loss=0.5, accuracy=0.9, mcc=0.8, confusion=[[5, 1], [0, 4]])
    log.close()
    text = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    step, event, validation = map(json.loads, text.splitlines())
    assert step == {
        "kind": "step",
        "time": 1700000000.123,
        "step": 1,
        "epoch": 0,
        "generation": 2,
        "loss": 1.5,
        "learning_rate": 1e-4,
        "grad_norm": 0.75,
        "seconds": 0.1,
        "tokens_per_second": 300.0,
        "exchange_ms": 12.5,
        "exchange_bytes": 4096,
        "exchange_exposed_ms": 2.5,
        "worker_tokens_per_second": {"0": 100.0, "1": 200.0},
        "worker_seconds": {"0": 0.05, "1": 0.0975},
        "worker_samples": {"0": 5, "1": 11},
        "sample_ranges": [[0, 0, 5], [1, 5, 16]],
    }
    assert (event["event"], event["rank"]) == ("lost", 1)
    assert validation["mcc"] == 0.8
    assert validation["confusion"] == [[5, 1], [0, 4]]


def test_numbers_that_json_lacks_become_null(tmp_path: Path):
    log = MetricsLog(tmp_path)
    log.record_step(metrics(1, loss=math.nan, grad_norm=math.inf))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line
    assert json.loads(line)["loss"] is None


def test_the_abandoned_future_is_marked_not_deleted(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.record_step(metrics(step))
    log.record_event("lost", 3, rank=0)
    log.record_event("resumed", 1, checkpoint="step-000001")
    log.record_step(metrics(2, loss=9.0))
    path = tmp_path / "metrics.jsonl"
    current = read_metrics(path)
    assert [(r["kind"], r["step"]) for r in current] == [
        ("step", 1),
        ("event", 3),
        ("event", 1),
        ("step", 2),
    ]
    assert current[-1]["loss"] == 9.0
    assert len(read_metrics(path, abandoned=True)) == 6


def test_steps_of_an_earlier_process_are_known_until_they_are_void(tmp_path: Path):
    log = MetricsLog(tmp_path)
    assert not log.has_steps()
    log.record_event("listening", 0)
    assert not log.has_steps()
    log.record_step(metrics(1))
    again = MetricsLog(tmp_path)
    assert again.has_steps()
    again.record_event("resumed", 0, reason="there was no checkpoint yet")
    assert not again.has_steps()


def test_a_line_torn_by_a_cut_swallows_nothing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    log = MetricsLog(tmp_path)
    log.record_step(metrics(2))
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


FULL_DISK = """
import os, resource, signal, sys
from pathlib import Path
from tests.trainer.tracking.test_metrics import metrics, with_board
from trainer.tracking.metrics import read_metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
alarms = []
output = Path(sys.argv[1])
log = with_board(output, alarms.append)
log.record_step(metrics(1))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
for step in range(2, 10):
    log.record_step(metrics(step))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.record_step(metrics(10))
log.close()
print(len(alarms), all("\\n" not in alarm for alarm in alarms))
steps = [record["step"] for record in read_metrics(output / "metrics.jsonl")]
print(steps[0], steps[-1], len(steps) < 10)
"""


def test_a_full_disk_raises_one_alarm_for_each_file_and_the_run_goes_on(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["2 True", "1 10 True"]
    assert 10 in [step for _, step, _ in scalars(tmp_path / "tensorboard")]


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Every scalar in a folder of event files, read by tensorboard's own loader."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = []
    for file in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(file)).Load():
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_has_the_same_numbers(tmp_path: Path):
    log = with_board(tmp_path)
    log.record_step(metrics(1))
    log.record_validation(1, loss=0.5, accuracy=0.75, mcc=None)
    log.close()
    values = {tag: value for tag, step, value in scalars(tmp_path / "tensorboard") if step == 1}
    assert values["loss"] == 1.5
    assert values["samples/rank_1"] == 11
    assert values["tokens_per_second/rank_0"] == 100
    assert values["tokens_per_second"] == 300
    assert values["validation/accuracy"] == 0.75
    assert "validation/mcc" not in values
    assert {"learning_rate", "grad_norm", "exchange_bytes"} <= values.keys()
    assert (values["exchange_ms"], values["exchange_exposed_ms"]) == (12.5, 2.5)


def test_tensorboard_shows_events_and_drops_the_abandoned_future(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = with_board(tmp_path)
    for step in (1, 2, 3):
        log.record_step(metrics(step))
    log.record_event("resumed", 1, reason="coordinator restarted")
    log.record_step(metrics(2, loss=9.0))
    log.record_step(metrics(3, loss=None))  # no token of it was learned
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"] is None
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("loss")] == [(1, 1.5), (2, 9.0)]
    (text,) = [e.tensor_proto.string_val[0].decode() for e in board.Tensors("events")]
    assert text == "resumed  reason=coordinator restarted"


def test_tensorboard_loads_quietly_and_without_a_framework(tmp_path: Path):
    script = (
        "import sys\n"
        "from trainer.tracking.trackers.tensorboard_file import TensorBoardFile\n"
        "assert 'tensorboard' not in sys.modules, 'lazy'\n"
        "from pathlib import Path\n"
        "board = TensorBoardFile(Path(sys.argv[1], 'board'), print)\n"
        "board.record_text(0, 1.0, 'events', 'joined')\n"
        "board.close()\n"
        "assert 'tensorboard' in sys.modules\n"
        "print([m for m in ('torch', 'tensorflow', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_tensorboard_the_lines_are_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    alarms: list[str] = []
    log = with_board(tmp_path, alarms.append)
    log.record_step(metrics(1))
    log.record_step(metrics(2))
    assert len(alarms) == 1
    assert "not installed" in alarms[0]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_two_writers_never_mix_within_a_line(tmp_path: Path):
    logs = [MetricsLog(tmp_path) for _ in range(2)]
    for step in range(1, 50):
        logs[step % 2].record_step(metrics(step))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 49
