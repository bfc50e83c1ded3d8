"""The picture of `status --watch` on narrow and wide terminals, and who feeds it."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.errors import UnreachableError
from launcher.hosts import ssh
from launcher.hosts.base import Connection
from launcher.hosts.local import LocalConnection
from launcher.inventory.facts.devices import Device
from launcher.inventory.facts.gauges import Gauge
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from launcher.runs.failures import Failure
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from launcher.runs.records.run import Run
from launcher.runs.status import RunMonitor, RunView
from launcher.views import render, telemetry
from launcher.views.follow import draws_pictures
from launcher.views.live_view import EventFeed, live_view
from launcher.views.processes import processes_table
from launcher.views.render import format_progress
from launcher.views.telemetry import StepRate, Telemetry, TelemetrySnapshot
from tests.launcher.keeping import python_process
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

GIB = 1 << 30
UUID = "GPU-6f1e0b1c-0000-1111-2222-333344445555"
CARD = Device("cuda", UUID, "NVIDIA GeForce RTX 4090", 24 * GIB)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    worker = python_process(tmp_path, "print('hi')")
    here = Host(name="intel", address="10.0.0.1")
    far = Host(name="lambda-with-a-very-long-name", devices=(CARD,))
    processes = (
        replace(worker, name="coordinator", role="coordinator", rank=None, device="", host="intel"),
        replace(worker, host="intel"),
        replace(worker, name="worker-1", rank=1, device=UUID, backend="cuda", host=far.name),
    )
    plan = LaunchPlan(
        run_id="demo-20261121-130000-7f3a",
        output="/nowhere",
        bind_address="",
        port=1,
        hosts=(here, far),
        processes=processes,
    )
    return Run(plan, 0.0, (here, far))


TRAINING: dict[str, Any] = {
    "step": 120,
    "total_steps": 480,
    "loss": 1.23456,
    "tokens_per_second": 4200.0,
    "exchange_ms": 35.4,
    "exchange_exposed_ms": 8.6,
    "epoch": 1,
    "learning_rate": 0.0001,
    "workers": [
        {"rank": 0, "state": "active", "samples": 3, "tokens_per_second": 1000.0},
        {"rank": 1, "state": "idle", "samples": 9, "tokens_per_second": 3200.0},
    ],
}


def snapshot(run: Run, **changes: Any) -> TelemetrySnapshot:
    states = {p.name: ProcessState(state="running", attempt=1) for p in run.plan.processes}
    view = RunView(run, "running", None, states, TRAINING)
    gauges = {
        "intel": {"cpu": Gauge(3 * GIB, 8 * GIB, 51.0)},
        run.hosts[1].name: {UUID: Gauge(24 * GIB, 24 * GIB, 91.0, 98)},
    }
    made = TelemetrySnapshot(view, 0.2, gauges, (3.0, 2.0, 1.2), left=185.0)
    return replace(made, **changes)


def drawn(picture: TelemetrySnapshot, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(live_view(picture, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_eighty_columns_hold_it(run: Run) -> None:
    lines = drawn(snapshot(run), 80)
    assert max(len(line) for line in lines) <= 80
    text = "\n".join(lines)
    assert "demo-20261121-130000-7f3a  running" in lines[0]
    for words in ("step 120/480", "25 %", "loss 1.2346", "4,200 tokens/s"):
        assert words in text
    assert "exchange 35 ms (9 exposed)" in text
    for words in ("epoch 2", "3:05 left", "lr 1.00e-04", "loss █▄▁  █ 3  ▁ 1.2"):
        assert words in text
    first, second = (next(ln for ln in lines if ln.startswith(f"worker-{r}")) for r in "01")
    coordinator = next(line for line in lines if line.startswith("coordinator"))
    assert " ".join(coordinator.split()) == "coordinator intel - running - - 3.0/8 GiB 51 °C"
    shown = "worker-0 intel cpu active 100 % 1,000"
    assert " ".join(first.split()) == shown, "memory once a host"
    words = "idle - 3,200 24.0/24 GiB 91 °C"
    assert second.split()[-len(words.split()) :] == words.split(), "who is idle has no share"
    assert "RTX 4090" in second
    assert "lambda-" in second
    assert run.hosts[1].name not in second


@pytest.mark.parametrize("width", [60, 80, 100])
def test_status_has_the_columns_units_and_order_of_the_live_view(run: Run, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(processes_table(snapshot(run).view, width))
    assert isinstance(console.file, io.StringIO)
    status = console.file.getvalue().splitlines()
    live = drawn(snapshot(run, gauges={}), width)
    (heading,) = [line for line in live if line.startswith("NAME")]
    assert status[0].split() == heading.split()
    plain = [line.replace("█", "") for line in live[live.index(heading) + 1 :]]
    for row, drawn_row in zip(status[1:], plain, strict=False):
        cells, others = row.split(), drawn_row.split()
        assert [cells[0], *cells[2:]] == [others[0], *others[2:]], "hosts may be cut"


def test_a_bar_for_each_share_and_temperatures_in_colour(run: Run) -> None:
    whole = snapshot(run)
    workers = [
        {"rank": 0, "state": "active", "samples": 1, "tokens_per_second": 9.0},
        {"rank": 1, "state": "active", "samples": 3, "tokens_per_second": 27.0},
    ]
    view = replace(whole.view, training={**TRAINING, "workers": workers})
    lines = drawn(replace(whole, view=view), 120)
    bars = [line.split("%")[1].split()[0] for line in lines if line.startswith("worker-")]
    assert bars == ["██", "██████"]
    colours: list[str] = []
    for degrees in (40.0, 75.0, 90.0):
        console = Console(
            file=io.StringIO(), width=120, force_terminal=True, color_system="standard"
        )
        gauges = {"intel": {"cpu": Gauge(3 * GIB, 8 * GIB, degrees)}}
        console.print(live_view(snapshot(run, gauges=gauges), 120))
        assert isinstance(console.file, io.StringIO)
        colours += re.findall(r"\x1b\[(\d+)m\d+ °C", console.file.getvalue())
    assert colours == ["32", "33", "31"], "green, yellow, red"


def test_what_happens_is_told_as_it_happens(run: Run) -> None:
    feed, whole = EventFeed(lambda: "10:14:26"), snapshot(run)
    assert feed.update(whole.view) == (), "what was so before is no event"
    workers = [TRAINING["workers"][0], {"rank": 1, "state": "lost", "samples": 0}]
    scores = {"step": 100, "loss": 0.79981, "accuracy": 0.665}
    training = {**TRAINING, "workers": workers, "validation": scores}
    view = replace(whole.view, training=training)
    events = feed.update(view)
    assert events == (
        "10:14:26 worker-1: lost",
        "10:14:26 validation at step 100: loss 0.7998, accuracy 0.665",
    )
    assert feed.update(view) == events, "each once"
    states = {**view.processes, "worker-1": ProcessState(state="running", attempt=2)}
    assert feed.update(replace(view, processes=states))[-1] == (
        "10:14:26 worker-1: running, attempt 2"
    )
    lines = drawn(snapshot(run), 80)
    console = Console(file=io.StringIO(), width=80, force_terminal=False, highlight=False)
    console.print(live_view(snapshot(run), 80, events))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[len(lines) + 1 :] == list(events)


def test_a_high_terminal_has_a_high_curve(run: Run) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False, highlight=False)
    console.print(live_view(snapshot(run), 80, rows=4))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    curve = lines[next(i for i, line in enumerate(lines) if line.startswith("loss █")) :][:4]
    assert [line.split()[-1] for line in curve] == ["3", "█", "█▇", "1.2"]


def test_a_validation_has_a_line_of_its_own(run: Run) -> None:
    whole = snapshot(run)
    validation = {"step": 100, "loss": 0.79981, "accuracy": 0.665, "mcc": 0.6}
    view = replace(whole.view, training={**TRAINING, "validation": validation})
    lines = [line.strip() for line in drawn(replace(whole, view=view), 80)]
    after = lines.index("loss 1.2346  lr 1.00e-04  4,200 tokens/s  exchange 35 ms (9 exposed)") + 1
    assert lines[after] == "validation loss 0.7998  accuracy 0.665  MCC 0.600  at step 100"
    assert "validation" not in "\n".join(drawn(whole, 80))


def test_an_exchange_whose_exposed_part_is_not_known(run: Run) -> None:
    whole = snapshot(run)
    training = {key: value for key, value in TRAINING.items() if key != "exchange_exposed_ms"}
    text = "\n".join(drawn(replace(whole, view=replace(whole.view, training=training)), 80))
    assert "exchange 35 ms\n" in "\n".join(map(str.rstrip, text.splitlines()))


def test_codec_and_rounds_in_use_are_shown(run: Run) -> None:
    whole = snapshot(run)
    training = {**TRAINING, "codec": "int8", "inner_steps": 20}
    view = replace(whole.view, training=training)
    text = " ".join("\n".join(drawn(replace(whole, view=view), 80)).split())
    assert "exchange 35 ms (9 exposed), int8, rounds of 20 steps" in text
    assert "4,200 tokens/s, int8, rounds of 20 steps" in format_progress(training)
    assert format_progress({**training, "inner_steps": None}).endswith("tokens/s, int8")
    assert format_progress(TRAINING).endswith("tokens/s")
    assert "step 120/480, loss -, 4,200" in format_progress({**TRAINING, "loss": None})


@pytest.mark.parametrize(
    ("terminal", "kind", "drawn"),
    [(True, "xterm", True), (True, "dumb", False), (True, None, False), (False, "xterm", False)],
)
def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: str | None, drawn: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("TERM", raising=False)
    if kind is not None:
        monkeypatch.setenv("TERM", kind)
    assert draws_pictures() is drawn


def test_without_a_gpu_no_column_is_empty(run: Run) -> None:
    gauges = {"intel": {"cpu": Gauge(3 * GIB, 8 * GIB)}}
    lines = drawn(snapshot(run, gauges=gauges), 80)
    heading = next(line for line in lines if line.startswith("NAME"))
    assert heading.split()[-2:] == ["TOKENS/S", "MEMORY"], "no column of dashes alone"


def test_wider_terminals_show_more(run: Run) -> None:
    text = "\n".join(drawn(snapshot(run), 140))
    assert run.hosts[1].name in text
    for words in ("LOAD", "98 %"):
        assert words in text
    again = ProcessState(state="backoff", attempt=2, exit_code=3)
    whole = snapshot(run)
    view = replace(whole.view, processes={**whole.view.processes, "worker-1": again})
    text = "\n".join(drawn(replace(whole, view=view), 140))
    for words in ("ATTEMPT", "LAST EXIT", "exit code 3"):
        assert words in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 110, 200])
def test_nothing_is_wider_than_the_terminal(run: Run, width: int) -> None:
    failure = Failure("worker-1 failed", ("x" * 300,))
    for picture in (snapshot(run), snapshot(run, failures=(failure,), age=60.0)):
        assert max(len(line) for line in drawn(picture, width)) <= width


def test_who_is_away_is_marked(run: Run) -> None:
    whole = snapshot(run)
    far = run.hosts[1].name
    states = {**whole.view.processes, "worker-1": ProcessState(state="unreachable")}
    view = replace(
        whole.view, processes=states, unreachable={far: f"host {far}: no answer within 3 s"}
    )
    text = "\n".join(drawn(replace(whole, view=view, gauges={}, age=7.0), 100))
    assert "unreachable" in text
    assert f"! host {far}: no answer within 3 s" in text
    assert "(as it was 7 s ago)" in text


def test_before_anything_is_known(run: Run) -> None:
    states = {p.name: ProcessState(state="absent") for p in run.plan.processes}
    view = RunView(run, "starting", "waiting", states, None)
    text = "\n".join(drawn(TelemetrySnapshot(view, 0.0), 80))
    assert "starting" in text
    assert "step" not in text


def test_a_worker_whose_process_is_back_is_on_its_way(run: Run) -> None:
    whole = snapshot(run)
    workers = [TRAINING["workers"][0], {"rank": 1, "state": "lost", "samples": 0}]
    view = replace(whole.view, training={**TRAINING, "workers": workers})
    assert "rejoining" in "\n".join(drawn(replace(whole, view=view), 80))


def test_the_last_log_lines_of_a_failed_worker_are_shown(run: Run) -> None:
    failure = Failure("worker-1 on x: attempt 1 ended, killed by SIGKILL; starts again", ("out",))
    lines = drawn(snapshot(run, failures=(failure,)), 80)
    assert lines[-2].strip() == failure.heading
    assert lines[-1].strip() == "out"


def test_the_time_that_is_left_goes_by_the_pace_of_late(run: Run) -> None:
    view, pace = snapshot(run).view, StepRate()
    for now, step in ((0.0, 100), (1.0, 100), (10.0, 120)):
        assert pace.seconds_left(view) is None
        pace.update(replace(view, training={**TRAINING, "step": step}), now)
    assert pace.seconds_left(view) == pytest.approx(180.0)
    pace.update(replace(view, training={**TRAINING, "step": 90}), 11.0)
    assert pace.seconds_left(view) is None, "it went on from a checkpoint"
    pace.update(replace(view, state="recovering"), 12.0)
    assert pace.seconds_left(view) is None


def test_a_dead_host_does_not_hold_up_the_picture(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(host: Host) -> Connection:
        if host.name == "intel":
            return LocalConnection()
        raise UnreachableError(f"host {host.name}: no route")

    monkeypatch.setattr(ssh, "connect_host", connect)
    monkeypatch.setattr(telemetry, "LOOK_EVERY", 0.01)
    worker = run.plan.processes[1]
    SessionSupervisor(LocalConnection(), run.run_id).start_process(worker)
    looking = Telemetry(RunMonitor(run))
    looking.start()
    try:
        wait_for(lambda: "intel" in looking.get_snapshot().gauges, "gauges")
        wait_for(lambda: looking.get_snapshot().view.processes[worker.name].is_over, "the end")
        latest = looking.get_snapshot()
        assert list(latest.gauges) == ["intel"]
        assert latest.gauges["intel"]["cpu"].memory_total
        assert latest.view.processes["worker-1"].state == "unreachable"
        assert latest.view.unreachable
    finally:
        looking.close()


def test_a_run_without_ranks_goes_by_names(run: Run) -> None:
    student, teacher, _ = run.plan.processes
    plan = replace(
        run.plan,
        processes=(
            replace(student, name="student", role="student"),
            replace(teacher, name="teacher-0", role="teacher", rank=None, report_file="/beat"),
        ),
    )
    view = snapshot(replace(run, plan=plan)).view
    says = {"teacher-0": {"state": "waiting", "shards_done": 3, "shards": 12}}
    lines = drawn(replace(snapshot(run), view=replace(view, reports=says)), 80)
    table = lines[next(i for i, line in enumerate(lines) if "HOST" in line) :]
    assert table[0].split()[0] == "NAME"
    assert [line.split()[0] for line in table[1:3]] == ["student", "teacher-0"]
    assert "3/12" in table[2]
    assert "waiting" in table[2]


ENDED = ("distill-20261121-130000-7f3a", "quickstart-20261121-130000-1c2d")
LONG = "a-name-of-a-run-that-is-rather-long-20261121-130000-7f3a"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_status_and_runs_fit_the_terminal(run: Run, width: int) -> None:
    ended = ProcessState(state="backoff", attempt=3, exit_code=5)
    view = snapshot(run).view
    view = replace(view, processes={**view.processes, "worker-1": ended})
    long = replace(view, run=replace(run, plan=replace(run.plan, run_id=LONG, output="/" + LONG)))
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(processes_table(view, width))
    console.print(render.runs_table([view, view], width))
    console.print(render.runs_table([long], width))
    reason = "worker-1 has failed 5 times within 10 minutes"
    ends = (replace(long, state="stopped"), replace(long, state="failed", reason=reason))
    for end, run_id in zip(ends, ENDED, strict=True):
        other = replace(run, plan=replace(run.plan, run_id=run_id))
        console.print(render.runs_table([replace(end, run=other), view], width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(len(line) <= width or LONG in line for line in text.splitlines())
    whole = {"coordinator", "worker-1", "backoff", "active", "demo-20261121-130000-7f3a"}
    assert whole <= set(text.split())
    assert "exit code 5" in text
    assert "step 120/480, loss" in text
    assert ("OUTPUT" in text) == (width == 200)
    assert {LONG, *ENDED} <= set(text.split()), "what --resume takes is never cut"


def test_who_has_no_share_is_said_with_the_reason(run: Run) -> None:
    whole = snapshot(run)
    assert whole.view.remarks == ["worker 1 idle: would slow the step"]
    lost = {"rank": 1, "state": "lost", "samples": 0}
    view = replace(whole.view, training={**TRAINING, "workers": [TRAINING["workers"][0], lost]})
    words = "worker 1 lost, its samples moved to the others"
    assert view.remarks == [words]
    assert any(words in line for line in drawn(replace(whole, view=view), 60))
    over = {p.name: ProcessState(state="exited", exit_code=0) for p in run.plan.processes}
    assert not replace(view, processes=over).remarks
