"""What the tests of the launcher share: a real sshd, environments, the runs they start."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import PATIENCE, wait_for

if TYPE_CHECKING:
    from tests.launcher.sshd import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a real sshd on loopback."""
    from tests.launcher.sshd import running_sshd

    with running_sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture(autouse=True)
def supervisors() -> Iterator[None]:
    """Wait for the supervisors that a test has started here: they end with their runs."""
    yield
    access = sys.modules.get("launcher.agent.operations")
    while access and access._CHILDREN:
        access._CHILDREN.pop().wait(PATIENCE)


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test a state folder of its own."""
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def without_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a test starts import what is installed, and not this checkout."""
    monkeypatch.delenv("PYTHONPATH")


@pytest.fixture
def silent_hosts(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Return the hosts that are silent in this test: empty at its start."""
    from launcher.hosts import fleet

    silent: dict[Any, Any] = {}
    monkeypatch.setattr(fleet, "_SILENT", silent)
    return silent


@pytest.fixture(scope="session")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with pip, copied from our own, and nothing else."""
    from launcher.installation.venvs import make_venv, site_packages

    folder = tmp_path_factory.mktemp("bare") / "environment"
    make_venv(folder)
    pip = distribution("pip")
    for name in {Path(file).parts[0] for file in pip.files or () if file.parts[0] != ".."}:
        shutil.copytree(Path(str(pip.locate_file(name))), site_packages(folder) / name)
    return folder


@pytest.fixture(scope="session")
def uv_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this environment's uv."""
    from tests.launcher.handmade import make_uv

    return make_uv(tmp_path_factory.mktemp("uv"))


@pytest.fixture
def own_ssh(server: Server, own_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test known hosts, a pool and an ssh_config of its own, and end what it opened."""
    from launcher.hosts.ssh import close_all

    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("launcher.hosts.ssh._POOL.accept_new", False)
    before = server.config.read_text()
    yield
    close_all()
    server.config.write_text(before)
    server.known_hosts.write_text(server.known_line)


@pytest.fixture
def run_id() -> Iterator[str]:
    """Yield a run id, and prove afterwards that the test left nothing running."""
    from launcher.session.processes import find_run, send_signal

    name = f"test-{secrets.token_hex(4)}"
    yield name
    try:
        wait_for(lambda: not find_run(name), "everything is gone")
    finally:
        for process in find_run(name):
            send_signal(process, signal.SIGKILL)


@pytest.fixture
def home(tmp_path: Path, run_id: str) -> Path:
    """Return where processes have their folders, as in a state folder."""
    return tmp_path / "runs" / run_id / "processes"
