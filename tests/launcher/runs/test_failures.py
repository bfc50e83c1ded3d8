"""What went wrong since the last look: real supervisors, real logs."""

from pathlib import Path

import pytest

from launcher.hosts import ssh
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.failures import FailureWatch
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from launcher.runs.records.run import Run
from launcher.runs.status import RunMonitor, RunView
from launcher.session.spec import RestartPolicy
from tests.launcher.keeping import python_process
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "connect_host", lambda _host: LocalConnection())


def cockpit_of(process: ProcessPlan) -> RunMonitor:
    hosts = (Host(name=process.host, connection="local"),)
    plan = LaunchPlan(
        run_id="r", output="/nowhere", bind_address="", port=1, hosts=hosts, processes=(process,)
    )
    return RunMonitor(Run(plan, 0.0, hosts))


def view(monitor: RunMonitor, state: ProcessState) -> RunView:
    name = monitor.run.plan.processes[0].name
    return RunView(monitor.run, "running", None, {name: state}, None)


def state(name: str, attempt: int, exit_code: int | None = None) -> ProcessState:
    return ProcessState(state=name, attempt=attempt, exit_code=exit_code)


def test_each_failure_is_told_once_with_its_own_last_lines(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / 'mark'\n"
        "print('attempt', mark.exists() + 1)\n"
        "if not mark.exists(): mark.touch(); sys.exit(1)\n"
        "sys.exit(2)\n"
    )
    process = python_process(tmp_path, code)
    monitor = cockpit_of(process)
    watch = FailureWatch(monitor)
    assert watch.new_failures(monitor.observe()) == []
    supervisor = SessionSupervisor(LocalConnection(), "r", restart=RestartPolicy(first_delay=0.05))
    supervisor.start_process(process)
    found = []

    def over() -> bool:
        found.extend(watch.new_failures(look := monitor.observe()))
        return not look.is_live

    wait_for(over, "both attempts to fail")
    assert watch.new_failures(monitor.observe()) == []
    last = found[-1]
    assert last.heading == "worker-0 on localhost: attempt 2 ended, exit code 2; for good"
    assert last.log_lines == ("attempt 2",)
    assert last.lines == [last.heading, "  attempt 2"]


@pytest.mark.parametrize(
    ("before", "now", "news"),
    [
        (None, state("running", 3, 1), False),  # old news
        (None, state("backoff", 3, 1), True),
        (None, state("failed", 3, 4), True),
        (state("running", 1), state("running", 1), False),
        (state("running", 1), state("backoff", 1, 1), True),
        (state("running", 1), state("running", 2, 1), True),  # back before anybody looked
        (state("backoff", 1, 1), state("running", 2, 1), False),
        (state("running", 1), state("exited", 1, 0), False),
        (state("running", 1), state("stopped", 1), False),
        (state("running", 1), state("unreachable", 0), False),
        (state("running", 1), state("lost", 1), True),
    ],
)
def test_what_is_news(
    tmp_path: Path, before: ProcessState | None, now: ProcessState, news: bool
) -> None:
    monitor = cockpit_of(python_process(tmp_path, ""))
    watch = FailureWatch(monitor)
    if before is not None:
        watch.new_failures(view(monitor, before))
    assert bool(watch.new_failures(view(monitor, now))) == news
    assert watch.new_failures(view(monitor, now)) == []


def test_who_is_followed_anyway_is_left_out(tmp_path: Path) -> None:
    monitor = cockpit_of(python_process(tmp_path, ""))
    watch = FailureWatch(monitor, without=["worker-0"])
    assert watch.new_failures(view(monitor, state("failed", 1, 2))) == []
