"""Makes the helpers beside the tests importable (import-mode importlib adds no path)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from sshd import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a real sshd on loopback."""
    from sshd import running_sshd

    with running_sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture(autouse=True)
def keepers() -> Iterator[None]:
    """Wait for the supervisors that a test has started here: they end with their runs."""
    yield
    access = sys.modules.get("launcher.hosts.local")
    while access and access._CHILDREN:
        access._CHILDREN.pop().wait(30.0)


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with pip and nothing else."""
    from launcher.deploy.environments import make_venv

    folder = tmp_path_factory.mktemp("bare") / "environment"
    make_venv(folder, with_pip=True)
    return folder


@pytest.fixture
def copied_venvs(bare_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let environments with pip be copies of one, since to unpack pip takes seconds."""
    from launcher.deploy import environments

    make = environments.make_venv

    def copy(folder: Path, with_pip: bool) -> None:
        if with_pip:
            shutil.copytree(bare_venv, folder, symlinks=True, copy_function=os.link)
        else:
            make(folder, with_pip)

    monkeypatch.setattr(environments, "make_venv", copy)


@pytest.fixture
def own_ssh(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test known hosts, a pool and an ssh_config of its own, and end what it opened."""
    from launcher.hosts.ssh import close_all

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
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
    from keeping import wait_for

    from launcher.supervisor.processes import find_run, send_signal

    name = f"test-{secrets.token_hex(4)}"
    yield name
    try:
        wait_for(lambda: not find_run(name), "everything to be gone", 10.0)
    finally:
        for process in find_run(name):
            send_signal(process, signal.SIGKILL)


@pytest.fixture
def home(tmp_path: Path, run_id: str) -> Path:
    """Return where processes have their folders, as in a state folder."""
    return tmp_path / "runs" / run_id / "processes"
