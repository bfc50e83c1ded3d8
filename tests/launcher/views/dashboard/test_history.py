"""The history of a run: only new lines, bounded, and what the ledger says."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.records.registry import Registry
from launcher.views.dashboard import history as history_module
from launcher.views.dashboard.history import METRICS_FILE, History, count_samples, parse_record
from tests.launcher.views.dashboard.recorded_run import RUN_ID, RecordedRun
from trainer.tracking import metrics

pytestmark = pytest.mark.usefixtures("own_state")


def test_only_new_lines_are_read_and_a_cursor_outlives_the_reader(tmp_path: Path) -> None:
    assert metrics.METRICS_FILE == METRICS_FILE
    recorded = RecordedRun(tmp_path / "state")
    run = Registry.for_this_user().get_run(RUN_ID)
    history = History(run)
    history.read_on()
    cursor, text = history.select_lines_after(0) or (0, "")
    first = json.loads(text)
    assert [line["step"] for line in first if line["kind"] == "step"] == list(range(1, 11))
    assert cursor == (recorded.output / METRICS_FILE).stat().st_size
    recorded.step(11)
    with (recorded.output / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind": "step", "st')  # the trainer is writing it
    again = History(run)
    for each in (history, again):
        each.read_on()
        found = each.select_lines_after(cursor)
        assert found
        assert [line["step"] for line in json.loads(found[1])] == [11]
        assert each.select_lines_after(found[0]) == (found[0], "[]")


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    history = History(Registry.for_this_user().get_run(RUN_ID))
    history.read_on()
    cursor, _ = history.select_lines_after(0) or (0, "")
    (recorded.output / METRICS_FILE).write_text('{"kind": "validation", "step": 1, "time": 1.0}\n')
    history.read_on()
    assert history.select_lines_after(cursor) is None
    assert len(json.loads((history.select_lines_after(0) or (0, ""))[1])) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"kind": "else", "step": 1, "time": 1.0}',
        b'{"kind": "step", "step": -1, "time": 1.0}',
        b'{"kind": "step", "step": 1, "time": NaN}',
        b'{"kind": "event", "step": 1, "time": 1.0, "event": "' + b"x" * 65 + b'"}',
        b'{"kind": "event", "step": 1, "time": 1.0, "event": "lost", "reason": ["x"]}',
        b'{"kind": "step", "step": 1, "time": 1.0, "worker_samples": {"__proto__": 1}}',
    ],
)
def test_a_line_of_another_shape_is_left_out(line: bytes) -> None:
    assert parse_record(line) is None


def test_a_number_that_is_not_plain_is_left_out_of_its_line() -> None:
    kept = parse_record(
        b'{"kind": "step", "step": 1, "time": 1.0, "loss": Infinity, "more": {"a": []}}'
    )
    assert kept is not None
    assert {key: value for key, value in asdict(kept).items() if value is not None} == {
        "kind": "step",
        "step": 1,
        "time": 1.0,
        "epoch": 0,
        "exchange_bytes": 0,
        "worker_samples": {},
        "sample_ranges": [],
    }


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([[1, 4, 8], [0, 0, 4]], [0, 8, 0, 0]),
        ([[0, 0, 4], [1, 5, 8]], [0, 8, 1, 0]),
        ([[0, 0, 5], [1, 3, 8]], [0, 8, 0, 2]),
        ([[0, 0, 8], [1, 2, 4], [2, 9, 10]], [0, 10, 1, 2]),
        ([], [0, 0, 0, 0]),
    ],
)
def test_the_ledger_tells_what_is_missing_and_repeated(
    samples: list[list[int]], found: list[int]
) -> None:
    assert count_samples(samples) == found


def read(history: History) -> list[dict[str, Any]]:
    """Return all lines that are kept."""
    history.read_on()
    return json.loads((history.select_lines_after(0) or (0, ""))[1])


def test_a_resumed_run_goes_on_with_the_sums_of_its_checkpoint(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    recorded.metrics.record_event("resumed", 8)
    for number in range(9, 13):
        recorded.step(number)
    history = History(Registry.for_this_user().get_run(RUN_ID))
    last = read(history)[-1]
    assert last["step"] == 12
    tokens = sum(round((1000.0 + number) * 0.5) for number in range(1, 13))
    assert last["totals"] == [144, 0, 0, tokens, 12_000]
    recorded.step(14)
    recorded.step(13)
    assert read(history)[-1]["totals"][:3] == [168, 12, 24]  # a ledger that is wrong is told
    recorded.metrics.record_event("resumed", 0)
    recorded.step(1)
    assert read(history)[-1]["totals"][:3] == [12, 0, 0]


def test_no_spike_of_a_long_history_vanishes(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    spikes = {"loss": (31.0, -7.0), "tokens_per_second": (9e6, 0.0)}
    with (recorded.output / METRICS_FILE).open("a") as file:
        for step in range(11, 3001):
            line = {"kind": "step", "step": step, "time": 1.0, "loss": 1 + step % 7 / 10}
            line["tokens_per_second"] = 1000.0 + step % 11
            for number, (name, values) in enumerate(spikes.items()):
                for other, value in enumerate(values):
                    if step == 101 + 333 * number + 77 * other:
                        line[name] = value
            file.write(json.dumps(line) + "\n")
    lines = read(History(Registry.for_this_user().get_run(RUN_ID), 20_000))
    assert len(lines) < 200
    for name, values in spikes.items():
        found = [line[name] for line in lines if line["kind"] == "step"]
        assert (max(found), min(found)) == values


def test_a_long_history_is_thinned_out_and_loses_no_sum(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    whole = read(History(Registry.for_this_user().get_run(RUN_ID)))
    step = [line for line in whole if line["kind"] == "step"][-1]
    most = 200 * len(json.dumps(step))  # beside the answers, which stay
    history = History(Registry.for_this_user().get_run(RUN_ID), most)
    for number in range(11, 1001):
        recorded.step(number)
        if number % 10 == 0:
            recorded.metrics.record_event(
                "verified", number, at=number, digest="5f" * 32, ranks=[0]
            )
        if number % 20 == 0:
            lines = read(history)
            assert sum(len(json.dumps(line, separators=(",", ":"))) for line in lines) <= most
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == sorted(set(steps))
    assert steps[-20:] == list(range(981, 1001))  # the newest are all there
    # The older ones are evenly spread: a long run's beginning does not vanish.
    assert max(later - step for step, later in pairwise(steps)) < 200
    assert {1, 4} <= set(steps)  # the first, and the one behind a loss
    events = [line for line in lines if line["kind"] == "event"]
    assert [e for e in events if e["event"] != "verified"] == [
        line for line in whole[:-1] if line["kind"] == "event"
    ]
    assert events[-1]["proofs"] == 100
    assert [e for e in lines if e["kind"] == "step"][-1]["totals"][:3] == [12000, 0, 0]


def test_a_long_history_that_is_read_at_once_is_thinned_out_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedRun(tmp_path / "state")
    path = recorded.output / METRICS_FILE
    known = map(json.loads, path.read_text().splitlines())
    ledger = [line for line in known if line["kind"] == "step"][-1]
    with path.open("a") as file:
        for step in range(11, 12_001):
            if step == 200:  # of another shape, though its ledger is right
                odd = ledger | {"step": step, "worker_seconds": {"rank": 0.5}}
                file.write(json.dumps(odd) + "\n{\n")
            first = 12 * (step - 1)
            shards = [[rank, first + 4 * rank, first + 4 * rank + 4] for rank in range(3)]
            loss = {101: 31.0, 777: -7.0}.get(step, 1 + step % 7 / 10)
            file.write(
                json.dumps(ledger | {"step": step, "loss": loss, "sample_ranges": shards}) + "\n"
            )
            line = {"step": step, "time": 1.0}
            if step % 10 == 0:
                checkpoint = {"kind": "event", "event": "checkpoint", "path": f"/x/{step}"}
                answer = {"kind": "answer", "number": 1, "prompt": "?", "text": f"at {step}"}
                score = {"kind": "validation", "loss": 9.0 if step == 500 else 1 + step % 3}
                for each in (checkpoint, answer, score):
                    file.write(json.dumps(line | each) + "\n")
    assert path.stat().st_size > 3 << 20  # whole pages of it are far from the end
    rendered: list[object] = []
    whole = history_module._format_record
    monkeypatch.setattr(
        history_module, "_format_record", lambda it, sums: (rendered.append(it), whole(it, sums))[1]
    )
    most = 300_000
    lines = read(History(Registry.for_this_user().get_run(RUN_ID), most))
    assert sum(len(json.dumps(line, separators=(",", ":"))) for line in lines) <= most
    assert len(rendered) < 8_000
    steps = [line for line in lines if line["kind"] == "step"]
    assert (steps[0]["step"], steps[-1]["step"]) == (1, 12_000)
    assert (max(s["loss"] for s in steps), min(s["loss"] for s in steps)) == (31.0, -7.0)
    assert steps[-1]["totals"][:3] == [144_000, 0, 0]
    assert 4 in {step["step"] for step in steps}  # behind a loss
    scores = [line for line in lines if line["kind"] == "validation"]
    assert (scores[0]["step"], scores[-1]["step"]) == (10, 12_000)
    assert max(score["loss"] for score in scores) == 9.0
    answers = [line for line in lines if line["kind"] == "answer" and line["number"] == 1]
    assert (answers[0]["step"], answers[-1]["text"]) == (0, "at 12000")
    assert any(line.get("path") == "/x/12000" for line in lines)
