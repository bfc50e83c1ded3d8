"""The queue: what its files say after any process was killed, and jobs that end without a start."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launcher.errors import (
    BusyError,
    ConfigError,
    InterruptedStartError,
    PreflightError,
    UnreachableError,
)
from launcher.hosts.local import LocalConnection
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.configuration import JobRequest
from launcher.runs.cluster import Cluster
from launcher.runs.down import tear_down
from launcher.runs.queue import QueueRunner, check_inputs, enqueue_job, open_queue
from launcher.runs.records.queue_records import Queue, QueueEntry
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import Run
from launcher.runs.records.stored_configs import StartArguments
from launcher.views.follow import follow_run
from tests.launcher.played_hosts import Disk
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture
def start() -> StartArguments:
    """Return a start on one CPU of this machine, whose inventory needs no Ansible."""
    variables = ('motley_devices=[{"backend": "cpu"}]', f"motley_port={free_port()}")
    return StartArguments(extra_vars=variables)


@pytest.fixture
def queue(own_state: None) -> Queue:
    return open_queue(None)[0]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def runner(told: list[str]) -> QueueRunner:
    return QueueRunner(None, follow_run, told.append)


def order(**settings: Any) -> JobRequest:
    """Return a fine-tune whose model is missing: it gets as far as the checks of its start."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return JobRequest("coordinator", "quickstart", {"model.path": "absent", **given})


def add(start: StartArguments, **settings: Any) -> str:
    return enqueue_job(Cluster(None, start), order(**settings), None)


def entry_of(queue: Queue, run_id: str) -> QueueEntry:
    return next(entry for entry in queue.read_entries()[0] if entry.id == run_id)


def files(queue: Queue) -> list[str]:
    return LocalConnection().list_folder(queue.folder)


def plan_of(start: StartArguments, queue: Queue, run_id: str) -> Run:
    """Leave the plan that `up` writes before it starts anything, and the claim before that."""
    assert queue.claim(run_id)
    cluster = Cluster(None, start)
    with entry_of(queue, run_id).job.open_request() as job:
        launch = cluster.plan_launch(job, None, only_to_plan=False, run_id=run_id)
    run, record = cluster.registry.record_run(launch.plan)
    LocalConnection().write(cluster.registry.open_state_folder().plan_path(run_id), record)
    return run


def step(runner: QueueRunner) -> bool:
    return runner.run_next_job(*open_queue(None))


def test_a_job_means_the_same_wherever_it_is_read(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "name: mine\nnum_classes: 2\nmodel: {path: ./model}\ndata: {train: a.jsonl}\n"
    Path("run.yaml").write_text(text)
    start = StartArguments(extra_vars=("motley_port=9777", "token=secret"), expect_workers=1)
    cluster = Cluster(None, start)
    mine = JobRequest("coordinator", "run.yaml", {"output": "out"})
    run_id = enqueue_job(cluster, mine, 60.0)
    wanted = mine.resolve_job(cluster.hosts)
    Path("run.yaml").unlink()
    monkeypatch.chdir("/")

    entry = entry_of(queue, run_id)
    assert run_id.startswith("mine-")
    assert (entry.state, entry.job.config, entry.job.timeout) == ("waiting", text, 60.0)
    assert entry.job.start == replace(start, extra_vars=("motley_port=9777",))
    assert b"secret" not in entry.data
    with entry.job.open_request() as read:
        assert read.is_file
        assert read.resolve_job(cluster.hosts) == wanted
        assert str(read.resolve_job(cluster.hosts).to_yaml()).count(str(tmp_path)) == 3


def test_a_job_that_cannot_be_used_is_not_added(start: StartArguments, queue: Queue) -> None:
    with pytest.raises(ConfigError, match=r"training\.epoch: unknown key"):
        add(start, training__epoch=2)
    assert files(queue) == []


def test_a_model_and_data_that_are_not_there_are_refused(
    start: StartArguments, tmp_path: Path
) -> None:
    cluster = Cluster(None, start)
    data = tmp_path / "train.jsonl"
    absent = {"model.path": str(tmp_path / "model"), "data.train": str(data)}
    with pytest.raises(PreflightError, match=rf"no model folder {tmp_path}/model") as caught:
        check_inputs(cluster, JobRequest("coordinator", "quickstart", absent))
    assert any(f"{data}: no such data file" in line for line in caught.value.details)


def test_hosts_that_do_not_answer_check_nothing_now(
    start: StartArguments, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> NoReturn:
        raise UnreachableError("host far: no answer within 8 s")

    monkeypatch.setattr("launcher.runs.cluster.survey_hosts", silent)
    check_inputs(Cluster(None, start), order(), told.append)
    assert told == [
        "model and data are checked when the job starts: host far: no answer within 8 s"
    ]


def test_the_oldest_is_first_whatever_its_name(start: StartArguments, queue: Queue) -> None:
    ids = [add(start, name=name) for name in ("zeta", "alpha", "mid")]
    assert [entry.id for entry in queue.read_entries()[0]] == ids


def test_a_full_disk_leaves_nothing(
    start: StartArguments, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ConfigError, match="queue cannot be written: No space left on device"):
            add(start)
    assert files(queue) == []


def test_what_is_no_job_is_named_and_passed_over(start: StartArguments, queue: Queue) -> None:
    run_id = add(start)
    folder = Path(queue.folder)
    (folder / "notes.txt").touch()
    (folder / ".a.json.01234567").write_text("{")
    (folder / "torn-1.json").write_text("{")
    (folder / "gone-1.run").touch()
    (folder / "folder-1.json").mkdir()
    (folder / "lock").touch()
    tree = json.loads((folder / f"{run_id}.json").read_text())
    (folder / "odd-1.json").write_text(json.dumps({**tree, "leader": "worker"}))
    for number, (key, value) in enumerate(
        (("added_at", 1e59), ("added_at", -1.0), ("timeout", 1e59), ("added_at", "soon")), 1
    ):
        (folder / f"late-{number}.json").write_text(json.dumps({**tree, key: value}))
    os.mkfifo(folder / "pipe-1.json")
    (folder / "device-1.json").symlink_to("/dev/zero")
    with (folder / "sparse-1.json").open("wb") as sparse:
        sparse.truncate(60 << 30)
    entries, skipped = queue.read_entries()
    assert [entry.id for entry in entries] == [run_id]
    for number, key in enumerate(("added_at", "added_at", "timeout", "added_at"), 1):
        assert skipped.pop(f"late-{number}.json").startswith(f"damaged: {key}: ")
    assert skipped.pop("sparse-1.json").startswith("damaged")
    assert skipped.pop("odd-1.json").startswith("damaged: leader: ")
    assert skipped.pop("torn-1.json").startswith("damaged")
    assert skipped == {
        "notes.txt": "not a file of the queue",
        ".a.json.01234567": "a write is unfinished",
        "gone-1.run": "there is no gone-1.json",
        "folder-1.json": "is a folder, not a file",
        "pipe-1.json": "is a named pipe, not a file",
        "device-1.json": "is a device, not a file",
    }
    end = {"state": "failed", "reason": None, "exit_code": 1, "run_id": run_id}
    (folder / f"{run_id}.end").write_text(json.dumps({**end, "time": 1e59}))
    assert entry_of(queue, run_id).state == "over"
    (folder / f"{run_id}.end").write_text("{")
    assert entry_of(queue, run_id).state == "over"


def test_a_claimed_job_is_not_removed(start: StartArguments, queue: Queue) -> None:
    first, second = add(start), add(start)
    assert queue.claim(first)
    with pytest.raises(PreflightError, match=f"launch cluster down --run {first}"):
        queue.remove(first)
    queue.remove(second)
    with pytest.raises(ConfigError, match=f"no {second} in the queue"):
        queue.remove(second)
    assert not queue.claim(second)
    assert files(queue) == [f"{first}.json", f"{first}.run"]
    queue.finish(first, "completed", None, 0)
    queue.remove(first)
    assert files(queue) == []


def test_of_a_removal_and_a_claim_at_once_one_is_refused(
    start: StartArguments, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim comes when the removal has looked, and before it has removed."""
    run_id = add(start)
    remove = LocalConnection.remove_file

    def after_the_claim(here: LocalConnection, path: str) -> None:
        if path.endswith(".json"):
            assert queue.claim(run_id)
        remove(here, path)

    monkeypatch.setattr(LocalConnection, "remove_file", after_the_claim)
    with pytest.raises(PreflightError, match="has been started"):
        queue.remove(run_id)
    assert entry_of(queue, run_id).state == "started"


def test_only_one_works_on_a_queue(queue: Queue, runner: QueueRunner) -> None:
    with (
        queue.lock(),
        pytest.raises(PreflightError, match=r"another `launch queue run`.*\(\S+@\S+ since"),
    ):
        runner.run_forever()
    with queue.lock():
        pass


def test_a_job_that_fails_does_not_keep_the_next(
    start: StartArguments, queue: Queue, runner: QueueRunner, told: list[str]
) -> None:
    first, second = add(start), add(start, training__epochs=2)
    Path(queue.folder, f"{first}.run").touch()  # who claimed it was killed before its plan
    assert step(runner)
    end = entry_of(queue, first).end
    assert end is not None
    assert (end.state, end.exit_code, end.run_id) == ("failed", 4, first)
    assert "no model folder" in str(end.reason)
    assert entry_of(queue, second).state == "waiting"
    assert step(runner)
    assert not step(runner)
    assert told[-1] == "the queue is empty; add a job: launch queue add"
    assert Registry.for_this_user().read_runs() == []


def test_a_start_that_was_cut_off_is_not_repeated(
    start: StartArguments, queue: Queue, runner: QueueRunner
) -> None:
    run_id = add(start)
    run = plan_of(start, queue, run_id)
    assert step(runner)
    end = entry_of(queue, run_id).end
    assert end is not None
    assert (end.state, end.reason, end.exit_code) == ("failed", "interrupted start", 130)
    assert run.read_stop_reason(run.leader_host, LocalConnection()) == "interrupted start"
    assert not step(runner)


def test_the_end_of_a_run_is_recorded_by_the_next_worker(
    start: StartArguments, queue: Queue, runner: QueueRunner
) -> None:
    run_id = add(start)
    tear_down(plan_of(start, queue, run_id), why="a worker is missing")
    assert step(runner)
    end = entry_of(queue, run_id).end
    assert end is not None
    assert (end.state, end.exit_code) == ("failed", 6)
    assert "a worker is missing" in str(end.reason)


@pytest.mark.parametrize(
    ("error", "state"),
    [(BusyError("the cluster is busy"), "waiting"), (UnreachableError("no answer"), "started")],
)
def test_a_job_that_could_not_start_now_is_kept(
    error: Exception,
    state: str,
    start: StartArguments,
    queue: Queue,
    runner: QueueRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def up(*_: object) -> NoReturn:
        raise error

    run_id = add(start)
    monkeypatch.setattr(Cluster, "start_run", up)
    if isinstance(error, BusyError):
        assert not step(runner)
    else:
        with pytest.raises(UnreachableError):
            step(runner)
    assert entry_of(queue, run_id).state == state


@pytest.mark.parametrize("ends", [True, False])
def test_ctrl_c_in_a_start_ends_the_worker_and_down_does_not(
    ends: bool,
    start: StartArguments,
    queue: Queue,
    runner: QueueRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def up(*_: object) -> NoReturn:
        try:
            raise KeyboardInterrupt if ends else ValueError
        except (KeyboardInterrupt, ValueError):
            raise InterruptedStartError("stopped during its start") from None

    run_id = add(start)
    monkeypatch.setattr(Cluster, "start_run", up)
    if ends:
        with pytest.raises(InterruptedStartError):
            step(runner)
    else:
        assert step(runner)
    assert entry_of(queue, run_id).state == "stopped"


def test_another_machines_job_is_passed_over(
    start: StartArguments,
    tmp_path: Path,
    told: list[str],
    silent_hosts: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host's word alone starts nothing: its units may write what lies there."""
    intel = Host(name="intel", address="10.0.0.1", devices=(Device("cpu", "cpu"),))
    monkeypatch.setattr("launcher.runs.cluster.load_inventory", lambda *_, **__: (intel,))
    monkeypatch.setattr("launcher.hosts.ssh.connect_host", lambda host: Disk(tmp_path / host.name))
    run_id = add(start, model__path="/models/absent")
    queue, registry = open_queue(Path("hosts.yml"))
    (entry,) = queue.read_entries()[0]
    assert queue.folder == str(tmp_path / "intel" / "queue")
    runner = QueueRunner(Path("hosts.yml"), follow_run, told.append)
    assert runner._is_trusted(entry, registry)

    changed = json.loads(entry.data)
    changed["start"]["extra_vars"] = ['motley_trainer_command=["sh"]']
    queue.add(run_id, json.dumps(changed).encode())
    assert not runner.run_next_job(queue, registry)
    assert told[0].startswith(f"{run_id} skipped: it was queued on ")
    assert entry_of(queue, run_id).state == "waiting"
