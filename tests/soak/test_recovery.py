"""Recovery times from a timeline that is written down here."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launcher.session.processes import ProcessIdentity
from tests.soak.faults import Injection
from tests.soak.recovery import Recovery, quantiles, recoveries, summary
from tests.soak.report import Report
from tests.soak.schedule import Fault
from tests.soak.timeline import Membership, Recorder, Timeline, Usage


def joined(at: float, *ranks: int) -> list[Membership]:
    return [Membership(at, "joined", rank) for rank in ranks]


def happened(kind: str, target: str, began: float, healed: float | None = None) -> Injection:
    return Injection(Fault(began, kind, target, 0.0), began, healed or began)


def only(found: list[Recovery]) -> Recovery:
    (recovery,) = found
    return recovery


BEGINNING = [Membership(0.0, "listening"), *joined(1.0, 0, 1, 2)]


def test_a_killed_worker_that_comes_back() -> None:
    members = [*BEGINNING, Membership(10.1, "lost", 1), Membership(16.0, "rejoined", 1)]
    timeline = Timeline([9.9, 10.05, 10.6, 10.7], members)
    found = only(recoveries([happened("kill worker", "worker-1", 10.0)], timeline))
    # The commit at 10.05 s is of the step that was under way.
    assert (found.lost, round(found.step or 0, 3), found.full) == (True, 0.6, 6.0)


def test_a_worker_that_another_loss_overlaps() -> None:
    """Full means all: the third worker is away for longer than the first."""
    members = [
        *BEGINNING,
        Membership(10.1, "lost", 1),
        Membership(12.0, "lost", 2),
        Membership(16.0, "rejoined", 1),
        Membership(19.0, "rejoined", 2),
    ]
    found = only(recoveries([happened("cut", "worker-1", 10.0)], Timeline([], members)))
    assert (found.full, found.step) == (9.0, None)


def test_a_short_stop_costs_no_member() -> None:
    members = [*BEGINNING, Membership(30.0, "lost", 1), Membership(31.0, "rejoined", 1)]
    fault = happened("stop worker", "worker-1", 10.0, 12.0)
    found = only(recoveries([fault], Timeline([13.0, 13.1], members)))
    assert (found.lost, found.full) == (False, None)
    assert round(found.step or 0, 3) == 3.1


def test_a_long_silence_lasts_until_it_is_healed() -> None:
    """The worker may be back in the list before the link is: it is full when both are so."""
    members = [*BEGINNING, Membership(12.0, "lost", 0), Membership(15.5, "rejoined", 0)]
    fault = happened("silence", "worker-0", 10.0, 15.0)
    assert only(recoveries([fault], Timeline([], members))).full == 5.5


def test_a_killed_coordinator_is_lost_until_another_one_has_all_workers() -> None:
    members = [*BEGINNING, Membership(13.0, "listening"), *joined(15.0, 0, 1), *joined(16.5, 2)]
    found = only(
        recoveries([happened("kill coordinator", "coordinator", 10.0)], Timeline([], members))
    )
    assert (found.lost, found.full) == (True, 6.5)


def test_a_loss_is_put_down_to_the_latest_fault_that_concerns_the_worker() -> None:
    members = [*BEGINNING, Membership(12.0, "lost", 1), Membership(19.0, "rejoined", 1)]
    faults = [
        happened("stop coordinator", "coordinator", 10.0, 11.0),
        happened("kill worker", "worker-1", 11.9),
        happened("cut", "worker-2", 11.95),
    ]
    found = recoveries(faults, Timeline([], members))
    assert [recovery.lost for recovery in found] == [False, True, False]
    (other,) = recoveries(faults[:1], Timeline([], members))
    assert (other.lost, other.full) == (True, 9.0)


def test_workers_that_never_come_back() -> None:
    members = [*BEGINNING, Membership(10.1, "lost", 2)]
    found = only(recoveries([happened("cut", "worker-2", 10.0)], Timeline([], members)))
    assert (found.lost, found.full) == (True, None)


def test_a_fault_that_did_not_happen_has_no_recovery() -> None:
    fault = Injection(Fault(1.0, "kill worker", "worker-0", 0.0), 1.0, 1.0, "not running")
    assert recoveries([fault], Timeline([], BEGINNING)) == []


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([]) is None
    assert quantiles([3.0]) == {"p50": 3.0, "p95": 3.0, "max": 3.0}
    assert quantiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "max": 100.0}


def test_figures_by_kind_in_report_and_json() -> None:
    members = [*BEGINNING, Membership(10.1, "lost", 1), Membership(12.0, "rejoined", 1)]
    timeline = Timeline([10.05, 10.5, 20.1, 20.2, 20.3], members)
    faults = [happened("cut", "worker-1", 10.0), happened("cut", "worker-0", 20.0)]
    found = recoveries(faults, timeline)
    row = summary(found)["cut"]
    assert (row["faults"], row["lost"]) == (2, 1)
    assert row["step"] == {"p50": 0.2, "p95": 0.5, "max": 0.5}
    assert row["full"] == {"p50": 2.0, "p95": 2.0, "max": 2.0}
    report = Report(
        seed=7,
        seconds=60.0,
        steps=40,
        taken_back=5,
        injections=faults,
        recoveries=found,
        checks=[],
        usage={("worker-0", 7): [Usage(5.0, 9, 8, 7)]},
        left_out={"full disk": "no small disk"},
        folder="/somewhere",
    )
    assert "cut                    2     1      0.2     0.5     0.5" in report.text()
    assert "full disk           left out: no small disk" in report.text()
    tree = json.loads(json.dumps(report.tree()))
    assert (tree["schema"], tree["seed"], tree["passed"]) == ("motley.soak/1", 7, True)
    assert tree["usage"][0]["last"] == {"at": 5.0, "memory": 9, "descriptors": 8, "threads": 7}
    assert [fault["step"] for fault in tree["faults"]] == [0.5, 0.2]


def test_a_recorder_follows_lines_as_they_are_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "event", "event": "listening"},
        {"kind": "event", "event": "joined", "rank": 0},
        {"kind": "step", "step": 1},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorder = Recorder(metrics, dict)
    recorder.start()
    with metrics.open("a") as stream:
        stream.write('{"kind": "st{"half": a line\n{"kind": "step", "step": 2}\n{"kind": "ev')
    recorder.stop()
    assert len(recorder.timeline.commits) == 1  # the first step was before the start
    assert recorder.timeline.present == {0}


def test_a_process_that_is_ending_does_not_end_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status lacks the line of its memory until its parent has waited for it."""
    monkeypatch.setattr("tests.soak.timeline._SAMPLE", 0.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    looks, twice = itertools.count(1), threading.Event()
    with subprocess.Popen(["true"]) as ended:
        status = Path("/proc", str(ended.pid), "status")
        while "VmRSS" in status.read_text():
            time.sleep(0.01)

        def processes() -> dict[str, ProcessIdentity]:
            if next(looks) == 2:
                twice.set()
            return {"worker-0": ProcessIdentity(ended.pid, 0, "")}

        recorder = Recorder(metrics, processes)
        recorder.start()
        assert twice.wait(60)
        recorder.stop()
    assert not recorder.timeline.usage
