"""The run's state from what its coordinator did and said."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.plan.distillation import place_distillation
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.processes.session import ProcessState
from launcher.runs.records.run import Run
from launcher.runs.records.self_reports import read_training
from launcher.runs.status import RunMonitor, RunView, derive_state, shards_written
from launcher.session.processes import ProcessIdentity, identify_process
from launcher.views.processes import processes_table
from launcher.views.render import status_tree
from trainer.config import distill_job
from trainer.config.run import load_config


@pytest.mark.parametrize(
    ("process", "said", "state"),
    [
        ("absent", None, "stopped"),
        ("starting", None, "starting"),
        ("running", None, "starting"),
        ("running", "waiting", "starting"),
        ("running", "running", "running"),
        ("running", "stopping", "stopping"),
        ("running", "completed", "stopping"),
        ("running", "failed", "stopping"),
        ("stopping", "running", "stopping"),
        ("backoff", "running", "recovering"),
        ("exited", "completed", "completed"),
        ("exited", "failed", "failed"),
        ("exited", "stopping", "stopped"),
        ("exited", "stopped", "stopped"),
        ("running", "stopped", "stopping"),
        ("stopped", "running", "stopped"),
        ("stopped", "completed", "completed"),
        ("failed", "running", "failed"),
        ("failed", None, "failed"),
        ("lost", "running", "failed"),
    ],
)
def test_the_state_of_a_run(process: str, said: str | None, state: str) -> None:
    training = None if said is None else {"state": said}
    assert derive_state(ProcessState(state=process), training) == state


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:

    host = Host(name="localhost", connection="local", fill_with_cpu=True, devices=())
    setting = PlanContext(run_id="run-1", trainer_command=("t",), state_folder="/s", routes={})
    return place_run([host], load_config("quickstart", {"output": str(tmp_path)}), 1, setting)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (json.dumps({"run_id": "run-1", "updated": 100.0}), True),
        (json.dumps({"run_id": "run-1", "updated": 99.0}), False),
        (json.dumps({"run_id": "run-2", "updated": 101.0}), False),
        ("[1]", False),
        ("torn {", False),
        ("", False),
    ],
)
def test_only_what_this_attempt_of_this_run_wrote_counts(
    tmp_path: Path, plan: LaunchPlan, text: str, counts: bool
) -> None:
    (tmp_path / "status.json").write_text(text)
    assert (read_training(LocalConnection(), plan, 100.0) is not None) == counts


def test_no_status_yet(plan: LaunchPlan) -> None:
    assert read_training(LocalConnection(), plan, None) is None


class Distillation:
    """A student that leads and a teacher beside it, by what their supervisors and they wrote."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("launcher.hosts.ssh.connect_host", lambda _host: LocalConnection())
        host = Host(name="localhost", connection="local", devices=())
        job = distill_job.load_job(
            None,
            {
                "teacher.model": "/t",
                "teacher.data": ["/d"],
                "student.model": "/s",
                "student.output": str(folder / "output"),
                "logits": str(folder / "logits"),
                "evaluation.data": ["/h"],
            },
        )
        state = str(folder / "state")
        setting = PlanContext(run_id="run-1", trainer_command=("t",), state_folder=state, routes={})
        plan = place_distillation([host], job, setting)
        self.run = Run(plan, 0.0, plan.hosts)
        self.pid = os.getpid()
        for process in plan.processes:
            self.supervisor(process.name, "running")

    def supervisor(self, name: str, state: str, **more: object) -> None:
        process = self.run.plan.find_process(name)
        assert process is not None
        living = state == "running"
        identity = asdict(require_identity(self.pid))
        tree = {
            "state": state,
            "supervisor": identity,
            "child": identity if living else None,
            "attempt": 1,
            "failures": 0,
            "exit_code": None if living else 0,
            "signal": None,
            "started": 10.0,
            "message": None,
            **more,
        }
        write(Path(process.folder) / "state.json", tree)

    def student_says(self, state: str, **more: object) -> None:
        tree = {"run_id": "run-1", "state": state, "updated": 20.0, "tokens_per_second": 5.0}
        write(Path(self.run.plan.output) / "status.json", tree | more)

    def teacher_says(self, pid: int, done: int) -> None:
        process = self.run.plan.find_process("teacher-0")
        assert process is not None
        tree = {"pid": pid, "state": "running", "shards_done": done, "shards": 12}
        write(Path(process.report_file), tree)


def write(path: Path, tree: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def require_identity(pid: int) -> ProcessIdentity:
    found = identify_process(pid)
    assert found is not None
    return found


@pytest.fixture
def distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distillation:
    return Distillation(tmp_path, monkeypatch)


def test_a_distillation_from_start_to_the_last_score(distillation: Distillation) -> None:
    monitor = RunMonitor(distillation.run)
    assert monitor.observe().state == "starting"
    distillation.student_says("waiting")
    assert monitor.observe().state == "waiting"
    distillation.student_says("running")
    assert monitor.observe().state == "running"
    distillation.student_says("completed")
    distillation.supervisor("student", "exited")
    view = monitor.observe()
    assert (view.state, view.is_live) == ("scoring", True)
    distillation.supervisor("evaluator-0", "exited")
    assert monitor.observe().state == "completed"


def test_a_teacher_takes_part_once_its_present_attempt_says_so(distillation: Distillation) -> None:
    monitor = RunMonitor(distillation.run)
    assert [process.name for process in monitor.observe().missing_processes] == ["teacher-0"]
    distillation.teacher_says(distillation.pid + 1, done=7)  # an earlier attempt did
    assert [process.name for process in monitor.observe().missing_processes] == ["teacher-0"]
    distillation.teacher_says(distillation.pid, done=3)
    view = monitor.observe()
    assert view.missing_processes == []
    student, teacher, _ = distillation.run.plan.processes
    assert (
        shards_written(view.find_report(teacher)),
        shards_written(view.find_report(student)),
    ) == ("3/12", "")
    distillation.student_says("running")
    assert monitor.observe().find_report(student)["tokens_per_second"] == 5.0


def test_a_run_of_which_everything_was_killed_says_why_and_how_to_resume(
    distillation: Distillation,
) -> None:
    distillation.student_says("running")
    supervisors = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    for name in ("student", "teacher-0", "evaluator-0"):
        distillation.pid = supervisors[name != "student"].pid
        distillation.supervisor(name, "running")
    supervisors[0].kill()
    supervisors[0].wait()
    view = RunMonitor(distillation.run).observe()
    why = "its supervisor was killed, or its host restarted"
    assert (view.state, view.reason, view.is_live) == ("failed", why, True)
    assert view.remarks == [
        "to resume it: launch cluster down --run run-1; launch distill up --resume run-1"
    ]
    supervisors[1].kill()
    supervisors[1].wait()
    view = RunMonitor(distillation.run).observe()
    assert (view.outcome, view.is_live) == (f"failed: {why}", False)
    assert view.remarks == ["to resume it: launch distill up --resume run-1"]


def test_failed_notifications_are_named_of_the_run_and_of_a_supervisor(
    distillation: Distillation,
) -> None:
    distillation.student_says("running", notify_failure="lost: curl: exit code 7")
    distillation.supervisor("teacher-0", "failed", notify_failure="failed: curl: exit code 7")
    assert RunMonitor(distillation.run).observe().remarks == [
        "notification failed: lost: curl: exit code 7",
        "teacher-0: notification failed: failed: curl: exit code 7",
    ]


class CountedReport(dict[str, Any]):
    """A worker's report that counts how often any is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedReport.reads += 1
        return super().get(key, default)


def reads_of_a_view(workers: int) -> int:
    """Return how many reads of workers' reports a status and a look of a start take."""
    host = Host(name="localhost", connection="local", fill_with_cpu=True, devices=())
    setting = PlanContext(run_id="run-1", trainer_command=("t",), state_folder="/s", routes={})
    plan = place_run([host], load_config("quickstart", {}), workers, setting)
    reports = [
        CountedReport(rank=rank, state="active", samples=3) for rank in reversed(range(workers))
    ]
    states = {process.name: ProcessState(state="running") for process in plan.processes}
    view = RunView(Run(plan, 0.0, (host,)), "running", None, states, {"workers": reports})
    CountedReport.reads = 0
    assert view.missing_processes == []
    assert [each["joined"] for each in status_tree(view)["processes"]] == [None, *[True] * workers]
    assert processes_table(view, None).row_count == workers + 1
    return CountedReport.reads


def test_a_view_reads_each_worker_s_report_a_fixed_number_of_times() -> None:
    assert reads_of_a_view(400) == 4 * reads_of_a_view(100)
