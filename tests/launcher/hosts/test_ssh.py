"""Hosts over a real SSH server: how they are reached, what is done there, and every way to fail."""

import getpass
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from launcher.agent import operations
from launcher.errors import ConfigError, PreflightError, UnreachableError
from launcher.hosts import bootstrap, fleet
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.ssh import close_all, connect_host, find_route
from launcher.inventory.hosts import Host
from launcher.runs.preflight.inspection import CHECKS, check_login_shell
from launcher.runs.processes.session import SessionSupervisor
from launcher.session.processes import find_run, identify_process, is_alive
from launcher.session.spec import RestartPolicy
from tests.launcher.keeping import python_process, wait_until_running
from tests.launcher.sshd import Server, end_sessions, refused
from tests.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("own_ssh")]


def test_a_host_is_used_as_if_it_were_here(server: Server, tmp_path: Path) -> None:
    connection = connect_host(server.host())
    assert connection is connect_host(server.host(devices=()))
    assert connection.user == getpass.getuser()
    assert Path(connection.python).samefile(sys.executable)
    data = os.urandom(3_000_000)
    connection.write(str(tmp_path / "a" / "file"), data)
    assert connection.read(str(tmp_path / "a" / "file")) == data
    assert connection.list_folder(str(tmp_path / "a")) == ["file"]
    assert connection.call("folder", {"path": str(tmp_path), "least": 1})["status"] == "ok"


def test_a_supervised_process_outlives_the_connection(server: Server, tmp_path: Path) -> None:
    run_id = f"test-{os.urandom(4).hex()}"
    process = python_process(tmp_path, "import time\nprint('up')\nwhile True: time.sleep(60)")
    supervisor = SessionSupervisor(connect_host(server.host()), run_id, RestartPolicy())
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "its first line")
    close_all()
    assert len(find_run(run_id)) == 2
    connection = connect_host(server.host())
    assert set(connection.ask(operations.find_run, run_id)) == set(find_run(run_id))
    supervisor = SessionSupervisor(connection, run_id, RestartPolicy())
    wait_until_running(supervisor, process)
    supervisor.stop_processes([process], 20.0)
    assert supervisor.read_state(process).state == "stopped"
    wait_for(lambda: not find_run(run_id), "everything to be gone")


def test_a_port_that_is_closed_and_a_name_that_is_none(server: Server) -> None:
    port = free_port()
    assert f"127.0.0.1 port {port} refused the connection" in refused(server.host(ssh_port=port))
    text = refused(server.host(address="no-such-host.invalid"))
    assert "the name no-such-host.invalid does not resolve" in text


def test_a_host_that_swallows_everything_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.hosts.ssh_config.CONNECT_TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = refused(server.host(ssh_port=port))
        assert "sent no SSH greeting within" in text


def test_a_login_that_never_ends_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.hosts.rpc.HELLO_DEADLINE", 2.0)
    keys = server.folder / "authorized_keys"
    before = keys.read_text()
    keys.write_text(f'command="sleep 600" {before}')
    try:
        assert refused(server.host()).endswith(": its login shell did not start within 2 s")
    finally:
        keys.write_text(before)


def test_something_else_that_listens_there_is_said(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            stream, _ = web.accept()
            with stream:
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        text = refused(server.host(ssh_port=web.getsockname()[1]))
        thread.join()
    assert "sent no SSH greeting within 8 s, but 'HTTP/1.1 400 Bad Request'" in text


def test_jump_hosts_are_verified_like_any_other(server: Server) -> None:
    server.config.write_text(
        server.config.read_text()
        + f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n"
        + f"Host door\n  HostName localhost\n  Port {server.port}\n"
        + f"Host dead\n  HostName 127.0.0.1\n  Port {free_port()}\n"
    )
    host = server.host(args=("-J", "gate"))
    assert connect_host(host).exists("/")
    command = [*find_route(host).command, "127.0.0.1", "echo", "there"]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b"there\n"
    assert "jump host door: its host key" in refused(server.host("two", args=("-J", "door,gate")))
    assert "host two: jump host dead: 127.0.0.1 port" in refused(
        server.host("two", args=("-J", "dead"))
    )
    text = refused(server.host("two", args=("-J", "gate"), ssh_port=free_port()))
    assert "through jump host gate: connect" in text


def test_jump_hosts_that_lead_to_each_other_are_refused(server: Server) -> None:
    server.config.write_text(
        f"Host gate\n  ProxyJump door\nHost door\n  ProxyJump gate\n{server.config.read_text()}"
    )
    text = refused(server.host(args=("-J", "gate")), ConfigError)
    assert text.endswith("their ProxyJump settings form a loop")


def test_two_jumps_and_hashed_names(server: Server) -> None:
    line = server.known_line.split(" ", 1)[1]
    server.known_hosts.write_text(f"{server.known_line}[localhost]:{server.port} {line}")
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", str(server.known_hosts)], check=True, capture_output=True
    )
    server.config.write_text(
        server.config.read_text()
        + f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n"
        + f"Host door\n  HostName localhost\n  Port {server.port}\n"
    )
    host = server.host(args=("-o", "ProxyJump=door,gate"))
    assert connect_host(host).exists("/")
    command = [*find_route(host).command, "127.0.0.1", "echo", "there"]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b"there\n"


def add_proxy(server: Server) -> None:
    """Let a program carry the bytes to a server."""
    relay = server.folder / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    server.config.write_text(
        server.config.read_text() + f"  ProxyCommand {sys.executable} {relay} %h %p 2>/dev/null\n"
    )


def test_a_proxy_may_hand_over_the_connection_itself(server: Server) -> None:
    opens = server.folder / "opens.py"
    opens.write_text(
        "import socket, sys\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "socket.send_fds(socket.socket(fileno=1), [b'x'], [s.fileno()])\n"
    )
    fails = server.folder / "fails.py"
    fails.write_text("")
    config = server.config.read_text() + f"  ProxyUseFdpass yes\n  ProxyCommand {sys.executable} "
    server.config.write_text(f"{config}{opens} %h %p\n")
    host = server.host()
    assert connect_host(host).exists("/")
    command = [*find_route(host).command, "127.0.0.1", "echo", "there"]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b"there\n"
    server.config.write_text(f"{config}{fails}\n")
    assert "passed no file descriptor (ProxyUseFdpass)" in refused(server.host("empty"))


def test_an_alias_of_an_included_file_is_enough(server: Server) -> None:
    (server.folder / "included").write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
    )
    server.config.write_text(f"Include {server.folder}/included\n{server.config.read_text()}")
    host = server.host(address=None, ssh_port=None, user=None)
    assert connect_host(host).exists("/")


def test_a_login_shell_that_prints_is_named(server: Server, tmp_path: Path) -> None:
    keys = server.folder / "authorized_keys"
    key = keys.read_text()
    prints = tmp_path / "prints"
    prints.write_text('echo "Welcome to the lab"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    quiet = check_login_shell(connect_host(server.host("quiet")))
    keys.write_text(f'command="sh {prints}" {key}')
    try:
        loud = check_login_shell(connect_host(server.host("loud")))
    finally:
        keys.write_text(key)
    assert quiet.status == "ok"
    assert (loud.status, "'Welcome to the lab'" in loud.detail) == ("warn", True)
    (row,) = (check for check in CHECKS if check.name == "login shell")
    assert "~/.bashrc" in row.remedy


def test_a_host_without_motley_says_which_recipe(server: Server, tmp_path: Path) -> None:
    text = refused(server.host(trainer_command=None), PreflightError)
    assert text.endswith(
        "Motley is not installed at /opt/motley; run: ansible-playbook recipes/gpu-training.yml"
    )
    text = refused(server.host(trainer_command=("/no/such/trainer",)), PreflightError)
    assert "and no python beside /no/such/trainer" in text
    for name, code in (("trainer", ""), ("python", "echo hm; echo 'No module named launcher' >&2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    text = refused(server.host(trainer_command=(str(tmp_path / "trainer"),)), PreflightError)
    assert "its version differs" in text
    (tmp_path / "python").write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    text = refused(server.host(trainer_command=(str(tmp_path / "trainer"),)))
    assert text.endswith("its agent exited: out of order")


def test_the_installation_s_own_python_is_used_where_there_is_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", sys.executable)
    monkeypatch.setattr(bootstrap, "RUN_USER", getpass.getuser())
    connection = connect_host(server.host(trainer_command=None))
    assert connection.exists("/")
    assert not connection.units


def is_free(lock: Path) -> bool:
    try:
        with LocalConnection().lock(str(lock), "mine"):
            return True
    except PreflightError:
        return False


def test_a_broken_connection_is_opened_again(server: Server) -> None:
    connection = connect_host(server.host())
    assert isinstance(connection, RemoteConnection)
    link = connection.open_link()
    os.kill(int(link.hello["pid"]), signal.SIGKILL)
    wait_for(lambda: link.broken is not None, "the link to break")
    assert connect_host(server.host()).exists("/")
    link = connection.open_link()
    end_sessions(server)
    wait_for(lambda: link.broken is not None, "the link to break")
    assert connection.exists("/")
    with connection.lock(str(server.folder / "lock"), "run"):
        end_sessions(server)
        wait_for(lambda: connection.is_spent, "the lock to be lost")
        wait_for(lambda: is_free(server.folder / "lock"), "the agent to end and free its lock")
        fresh = connect_host(server.host())
        assert fresh is not connection
        assert fresh.exists("/")


@pytest.mark.parametrize("timer", ["a timer that is over", "a timer that still runs"])
def test_units_are_controlled_beside_the_agent_by_sudo_s_one_rule(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timer: str
) -> None:
    if timer == "a timer that still runs":  # the thread that has just closed the channel
        monkeypatch.setattr("invoke.runners.Runner.timed_out", False)
    program = tmp_path / "motley unit"
    program.write_text(
        '#!/bin/sh\necho "$1 $2" >> "$0.log"\n'
        "case $2 in bad) echo no >&2; exit 4;; slow) exec sleep 600;; esac\n"
    )
    program.chmod(0o755)
    connection = connect_host(server.host())
    assert isinstance(connection, RemoteConnection)
    monkeypatch.setattr(connection, "units", True)
    monkeypatch.setattr("launcher.hosts.remote.UNIT_COMMAND", (str(program),))
    connection.control_unit("start", "motley-worker@a b:worker-0.service")
    assert Path(f"{program}.log").read_text() == "start motley-worker@a b:worker-0.service\n"
    with pytest.raises(PreflightError, match=r"host far: motley-unit stop bad: no"):
        connection.control_unit("stop", "bad")
    with pytest.raises(UnreachableError, match="motley-unit stop slow did not end within 0 s"):
        connection.control_unit("stop", "slow", 0.2)
    assert connection.exists("/")


def test_hosts_at_once_all_finish_and_their_errors_come_together(server: Server) -> None:
    dead = server.host("dead", ssh_port=free_port())
    lost = server.host("lost", address="no-such-host.invalid")
    hosts = [server.host("one"), dead, server.host("two"), lost]
    answers = fleet.ask_hosts(hosts, lambda _host, connection: connection.exists("/"), 60.0)
    assert answers.found == {"one": True, "two": True}
    assert list(answers.errors) == ["dead", "lost"]
    with pytest.raises(UnreachableError, match="host dead: ") as caught:
        answers.require()
    assert any("host lost: " in line for line in caught.value.details)


def test_many_threads_share_one_connection(server: Server, tmp_path: Path) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        connection = connect_host(server.host())
        path, data = str(tmp_path / f"{number}"), os.urandom(200_000)
        for _ in range(5):
            connection.write(path, data)
            if connection.read(path) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len([*tmp_path.glob("[0-5]")]) == 6


def test_this_machine_needs_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert connect_host(Host(name="localhost", connection="local")).exists("/")


@pytest.mark.parametrize("end", ["by itself", "by SIGKILL"])
def test_a_launcher_leaves_no_proxy_command(server: Server, tmp_path: Path, end: str) -> None:
    add_proxy(server)
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\n"
        "from launcher.hosts.ssh import connect_host\n"
        "from launcher.inventory.hosts import Host\n"
        "host = Host(name='far', address='127.0.0.1', ssh_port=int(sys.argv[2]),\n"
        "    ssh_args=('-F', sys.argv[3]), trainer_command=(sys.argv[4],))\n"
        "print(connect_host(host).open_link().hello['pid'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    trainer = Path(sys.executable).with_name("trainer")
    argv = [str(ROOT), str(server.port), str(server.config), str(trainer)]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline())
        children = [
            identify_process(child.pid) for child in psutil.Process(launcher.pid).children()
        ]
        assert children
        if end == "by SIGKILL":
            launcher.kill()
    wait_for(lambda: not any(child and is_alive(child) for child in children), "them to end")
    (config,) = (tmp_path / "state" / "ssh").iterdir()
    assert config.is_file()


def test_a_launcher_that_ends_meanwhile_leaves_no_proxy_command(server: Server) -> None:
    """A host that is late is waited for in a thread that ends with the process."""
    code = (
        "import sys, threading, time\nsys.path.insert(0, sys.argv[1])\n"
        "from launcher.hosts import login, ssh\n"
        "from launcher.inventory.hosts import Host\n"
        "host = Host(name='far', address='127.0.0.1', ssh_port=int(sys.argv[2]),\n"
        "    ssh_args=('-F', sys.argv[3]))\n"
        "threading.Thread(target=ssh.connect_host, args=(host,), daemon=True).start()\n"
        "import psutil\n"
        "while not login._OPEN: time.sleep(0.01)\n"
        "(one,) = login._OPEN\n"
        "while one._proxy is None: time.sleep(0.01)\n"
        "print(psutil.Process().children()[0].pid)\n"
    )
    add_proxy(server)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        argv = [str(ROOT), str(silent.getsockname()[1]), str(server.config)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *argv], capture_output=True, text=True, check=True
        )
        with pytest.raises(ProcessLookupError):
            os.kill(int(done.stdout), 0)
