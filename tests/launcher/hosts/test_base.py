"""What every connection does, for this machine and for one behind an agent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import frames, operations
from launcher.errors import PreflightError
from launcher.hosts.base import Connection
from launcher.hosts.local import LocalConnection
from launcher.session.processes import RUN_VARIABLE, identify_process, is_alive
from tests.launcher.agent_pipe import AgentHost, state_in
from tests.waiting import wait_for


@pytest.fixture(params=["local", "agent"])
def connection(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connection]:
    """Yield a connection; every implementation is a parameter."""
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    host = AgentHost(env=state_in(tmp_path / "state"))
    made = LocalConnection() if request.param == "local" else host.connect()
    yield made
    made.close()
    host.end()


def test_it_says_who_and_where_it_is(connection: Connection, tmp_path: Path) -> None:
    assert Path(connection.python).samefile(sys.executable)
    assert connection.user == LocalConnection().user
    assert connection.state_folder == str(tmp_path / "state")
    assert connection.units is False
    with pytest.raises(PreflightError, match=r"cannot start motley-worker@a:worker-0\.service"):
        connection.control_unit("start", "motley-worker@a:worker-0.service")


def test_files_come_back_as_they_were_written(connection: Connection, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "ö data"
    for data in (b"", b"\0\xff\n{}", os.urandom(2 * frames.PIECE), os.urandom(frames.PIECE + 7)):
        connection.write(str(path), data)
        assert connection.read(str(path)) == path.read_bytes() == data
        assert connection.file_size(str(path)) == len(data)
        assert connection.read(str(path), 3, 5) == data[3:8]
        assert connection.read(str(path), len(data) + 9) == b""
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert connection.list_folder(str(path.parent)) == ["ö data"]
    connection.remove_file(str(path))
    connection.remove_file(str(path))
    assert not connection.exists(str(path))
    assert connection.list_folder(str(tmp_path / "none")) == []


def test_what_is_not_there_or_not_allowed_is_the_same_error(
    connection: Connection, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        connection.read(str(tmp_path / "none"))
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        connection.file_size(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        connection.list_folder(str(tmp_path / "file"))
    with pytest.raises(IsADirectoryError):
        connection.read(str(tmp_path))


def test_folders_are_made_and_left_as_they_are(connection: Connection, tmp_path: Path) -> None:
    connection.make_folder(str(tmp_path / "a" / "b"))
    (tmp_path / "a").chmod(0o755)
    connection.make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    (tmp_path / "dangling").symlink_to("nowhere")
    assert connection.exists(str(tmp_path / "dangling"))


def test_a_lock_has_one_holder_whose_purpose_is_told(
    connection: Connection, tmp_path: Path
) -> None:
    path = str(tmp_path / "state" / "lock")
    with connection.lock(path, "run quickstart"):
        for other in (connection, LocalConnection()):
            with pytest.raises(PreflightError, match="run quickstart"), other.lock(path, "mine"):
                pass
    with connection.lock(path, "again"), pytest.raises(RuntimeError, match="inside"):
        raise RuntimeError("inside")
    with LocalConnection().lock(path, "free"):
        pass


def test_processes_are_started_found_signalled_and_outlive_it(
    connection: Connection, tmp_path: Path
) -> None:
    run_id, log = f"test-{os.urandom(4).hex()}", tmp_path / "log"
    code = "import time; print('here', flush=True); time.sleep(600)"
    connection.spawn_process((sys.executable, "-c", code), {RUN_VARIABLE: run_id}, str(log))
    wait_for(lambda: log.exists() and log.read_bytes() == b"here\n", "its first words")
    (process,) = connection.ask(operations.find_run, run_id)
    assert connection.is_alive(process)
    assert connection.ask(operations.describe_process, process).endswith(f"(pid {process.pid})")
    connection.close()
    assert is_alive(process)
    local = LocalConnection()
    assert local.ask(operations.send_group_signal, process, signal.SIGKILL)
    wait_for(lambda: not local.is_alive(process), "its end")


def test_signals_hit_this_very_process_alone(connection: Connection) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = identify_process(child.pid)
    assert process is not None
    assert connection.is_alive(process)
    leads = connection.ask(operations.send_group_signal, process, signal.SIGTERM)
    assert not leads  # a group
    assert connection.ask(operations.send_signal, process, signal.SIGTERM)
    assert child.wait(20.0) == -signal.SIGTERM
    assert not connection.ask(operations.send_signal, process, signal.SIGTERM)
    assert not connection.is_alive(process)


def test_questions_are_answered_in_plain_data(connection: Connection, tmp_path: Path) -> None:
    found = connection.call("folder", {"path": str(tmp_path), "least": 1})
    assert found["status"] == "ok"
    with pytest.raises(ValueError, match="no operation 'meaning'"):
        connection.call("meaning")


def test_many_threads_may_use_it_at_once(connection: Connection, tmp_path: Path) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        path, data = str(tmp_path / f"{number}"), os.urandom(50_000)
        for _ in range(10):
            connection.write(path, data)
            if connection.read(path) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(connection.list_folder(str(tmp_path))) >= 8


def test_the_role_s_installation_keeps_runs_in_the_role_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOTLEY_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert LocalConnection().state_folder == str(tmp_path / "motley")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "motley.json").write_text("{}")
    assert LocalConnection().state_folder == "/var/lib/motley"
