"""Processes under a real systemd: started by an operator, guarded, brought back after a reboot.

The host gets what the role trainer installs for units, and the launcher's own code in place of a
wheel; there is no trainer on it.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import jinja2
import pytest

from launcher.agent import operations
from launcher.hosts.bootstrap import agent_command
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink
from launcher.inventory.hosts import Host as InventoryHost
from launcher.plan.plan import ProcessPlan, unit_name
from launcher.runs.processes.systemd import SystemdSupervisor, open_supervisor
from launcher.session.spec import RestartPolicy
from tests import ROOT
from tests.launcher.agent_pipe import ProcessPipe
from tests.testbed.conftest import NewHost
from tests.testbed.host import Host
from tests.testbed.lab import Lab
from tests.testbed.processes import wait_until

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(300)]

ROLE = ROOT / "playbooks" / "roles" / "trainer"
PYTHON = "/opt/motley/current/bin/python"
STATE = "/var/lib/motley"
QUICK = RestartPolicy(first_delay=0.05, max_delay=0.1, max_failures=4)
UP = "import time\nprint('up', flush=True)\nwhile True: time.sleep(60)"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{UP}"
SETTINGS = {
    "trainer_user": "motley",
    "trainer_root": "/opt/motley",
    "trainer_state_folder": STATE,
    "trainer_unit_command": "/usr/local/sbin/motley-unit",
    "trainer_agent": [PYTHON, "-P", "-m", "launcher.agent"],
    "trainer_stop_seconds": 660,
    "trainer_writable_folders": ["/srv/motley"],
    "trainer_device_groups": [],
    "trainer_sudoers": ["ops"],
}


class SshPipe(ProcessPipe):
    """The operator's ssh from the lab to a host."""

    def __init__(self, lab: Lab, host: Host) -> None:
        self._ssh = partial(lab.command, env={"SHELL": "/bin/sh"})
        self._address = host.ip
        command = agent_command(InventoryHost(name=host.name))
        super().__init__(self._ssh(["ssh", self._address, command]))

    def run_program(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        program = self._ssh(["ssh", self._address, *argv])
        try:
            done = subprocess.run(
                program, capture_output=True, text=True, timeout=deadline, check=False
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return done.returncode, done.stdout + done.stderr


class Station:
    """A host that is ready for units, and a run on it."""

    def __init__(self, lab: Lab, host: Host) -> None:
        self.host = host
        self.run_id = f"test-20261121-130000-{secrets.token_hex(2)}"
        self._lab = lab
        self._pipes: list[SshPipe] = []
        self.connection = RemoteConnection(host.name, self._open)
        self.connection.open_link()
        supervisor = open_supervisor(self.connection, self.run_id, QUICK)
        assert isinstance(supervisor, SystemdSupervisor)
        self.supervisor = supervisor

    def _open(self) -> AgentLink:
        self._pipes.append(SshPipe(self._lab, self.host))
        return AgentLink(self.host.name, self._pipes[-1])

    def close(self) -> None:
        self.connection.close()
        for pipe in self._pipes:
            pipe.end()

    def process(self, code: str = UP, name: str = "worker-0") -> ProcessPlan:
        return ProcessPlan(
            name=name,
            role="worker",
            rank=0,
            local_rank=0,
            host=self.host.name,
            device="cpu",
            backend="cpu",
            threads=1,
            address="127.0.0.1:9000",
            argv=("/usr/bin/python3", "-c", code),
            env={"PYTHONUNBUFFERED": "1"},
            folder=f"{STATE}/runs/{self.run_id}/processes/{name}",
            certificate_names=(),
        )

    def up(self, process: ProcessPlan, attempt: int = 1) -> None:
        """Wait until an attempt has said that it is up."""

        def said() -> bool:
            return b"up\n" in self.supervisor.read_log(process, attempt)

        wait_until(said, 60, f"attempt {attempt} of {process.name} is not up")

    def over(self, process: ProcessPlan) -> None:
        def ended() -> bool:
            return self.supervisor.read_state(process).is_over

        wait_until(ended, 60, f"{process.name} goes on")

    def systemd(self, process: ProcessPlan) -> tuple[str, str]:
        """Return whether the unit is active, and whether it is enabled."""
        said = self.connection.call("units", {"names": [unit_name(self.run_id, process)]})
        shown = said["units"][unit_name(self.run_id, process)]
        return shown["ActiveState"], shown["UnitFileState"]


def install(lab: Lab, host: Host) -> None:
    """Do what the role does for units, from its own files."""
    root = host.folder / "root"
    host.exec(["useradd", "--system", "--uid", "7100", "--home-dir", STATE, "motley"])
    for folder in (STATE, "/srv/motley", "/opt/motley/code"):
        host.exec(["install", "-d", "-o", "motley", "-g", "motley", "-m", "0755", folder])
    host.exec(["python3", "-m", "venv", "--without-pip", "/opt/motley/current"])
    for package in ("launcher", "trainer"):
        lab.inside("cp", "-r", ROOT / package, root / "opt/motley/code" / package)
    site = host.exec([PYTHON, "-c", "import site; print(site.getsitepackages()[0])"]).stdout.strip()
    files = {
        f"{site}/motley.pth": ("0644", "/opt/motley/code\n"),
        "/usr/local/sbin/motley-unit": ("0755", (ROLE / "files/motley-unit").read_text()),
        "/etc/sudoers.d/zz-motley": ("0440", render("sudoers.j2")),
    }
    for role in ("worker", "coordinator"):
        text = render("motley-process.service.j2", role=role, gpus=role == "worker")
        files[f"/etc/systemd/system/motley-{role}@.service"] = ("0644", text)
    # As the launcher finds what the role installed: by this file, owned by the run user.
    files["/opt/motley/current/motley.json"] = ("0644", json.dumps({"sha256": "0" * 64}))
    for path, (mode, text) in files.items():
        host.exec(["install", "-m", mode, "/dev/stdin", path], input=text)
    host.exec(["chown", "motley:", "/opt/motley/current/motley.json"])
    host.exec(["systemctl", "daemon-reload"])


def render(template: str, **item: object) -> str:
    """Return a template of the role as Ansible renders it."""
    loader = jinja2.FileSystemLoader(ROLE / "templates")
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    return environment.get_template(template).render(item=item, **SETTINGS)


@pytest.fixture
def station(lab: Lab, new_host: NewHost) -> Iterator[Station]:
    host = new_host("bookworm", volumes={STATE: "50M"})
    install(lab, host)
    made = Station(lab, host)
    yield made
    made.close()


def test_a_unit_runs_as_the_run_user_and_ends_without_a_trace(station: Station) -> None:
    process, deaf = station.process(), station.process(DEAF, "worker-1")
    for each in (process, deaf):
        station.supervisor.start_process(each)
        station.up(each)
        assert station.systemd(each) == ("active", "enabled")
    assert station.connection.call("wanted_runs") == [station.run_id]
    state = station.supervisor.read_state(process)
    assert (state.state, state.attempt) == ("running", 1)
    assert state.supervisor is not None
    assert state.child is not None
    shown = station.host.exec(["ps", "-o", "user=,unit=", "-p", f"{state.supervisor.pid}"]).stdout
    assert shown.split() == ["motley", unit_name(station.run_id, process)]
    found = station.connection.ask(operations.find_run, station.run_id)
    assert {state.supervisor, state.child} <= set(found)

    station.supervisor.stop_processes([process, deaf], 3.0)

    for each in (process, deaf):
        assert station.supervisor.read_state(each).is_over
        assert station.systemd(each) == ("inactive", "disabled")
    assert station.supervisor.read_state(process).state == "stopped"
    assert station.connection.ask(operations.find_run, station.run_id) == []
    assert station.connection.call("wanted_runs") == []


def test_units_outlive_the_launcher_a_killed_supervisor_and_a_power_cut(station: Station) -> None:
    process, done = station.process(), station.process("print('up')", "worker-1")
    for each in (process, done):
        station.supervisor.start_process(each)
        station.up(each)
    station.over(done)
    state = station.supervisor.read_state(process)
    assert state.supervisor is not None

    station.connection.ask(operations.send_signal, state.supervisor, signal.SIGKILL)
    station.up(process, attempt=2)
    assert station.supervisor.read_state(process).state == "running"

    station.host.crash()
    station.host.start()
    station.host.wait_booted()
    reach(lambda: station.up(process, attempt=3))
    assert station.supervisor.read_state(process).attempt == 3
    assert station.supervisor.list_attempts(done) == [1]
    assert station.supervisor.read_state(done).state == "exited"

    station.supervisor.stop_processes([process, done], 20.0)
    for each in (process, done):
        assert station.systemd(each) == ("inactive", "disabled")


def reach(action: Callable[[], None]) -> None:
    """Do something on a host that was away; the link to it is found broken by the first try."""
    from launcher.errors import UnreachableError

    def tried() -> bool:
        try:
            action()
        except UnreachableError:
            return False
        return True

    wait_until(tried, 60, "the host is not reachable again")
