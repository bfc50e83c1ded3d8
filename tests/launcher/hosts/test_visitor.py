"""An agent that comes over the login: on a Python that has nothing of Motley."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.archive import agent_archive
from launcher.agent.operations import describe_machine, detect_devices, read_free_disk
from launcher.errors import PreflightError, UnreachableError
from launcher.hosts.bootstrap import agent_command, explain_failure
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.hosts.ssh import connect_host, visit_host
from launcher.inventory.facts.machine import read_machine_id
from launcher.inventory.hosts import Host
from tests.launcher.agent_pipe import ProcessPipe
from tests.launcher.sshd import Server

FAR = Host(name="far")
VISIT = agent_command(FAR, visiting=True)
BARE = Path(sys.base_prefix, "bin")
"""The Python below this environment: no package of ours or of anybody's."""


def shell(folder: Path, path: str) -> tuple[str, ...]:
    """Return a login shell on an otherwise empty environment."""
    home = f"HOME={folder}"
    return (
        "env",
        "-i",
        "-C",
        str(folder),
        f"PATH={path}",
        home,
        "sh",
        "-c",
        agent_command(FAR, visiting=True),
    )


def test_it_answers_what_an_installed_agent_answers(tmp_path: Path) -> None:
    pipe = ProcessPipe(shell(tmp_path, f"{BARE}:/usr/bin:/bin"))
    pipe.send(agent_archive())
    connection = RemoteConnection("far", lambda: AgentLink("far", pipe))
    machine = connection.ask(describe_machine)
    assert machine.identity == read_machine_id()
    assert machine.version == ""  # nothing of ours is there
    assert connection.ask(detect_devices).devices
    assert connection.ask(read_free_disk, str(tmp_path / "not" / "yet")) > 0
    connection.close()
    pipe.end()
    assert list(tmp_path.rglob("*")) == []  # nothing was written


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "host far: python3 is not installed; run there: apt install python3"),
        ("#!/bin/sh\necho motley: python 3.9 >&2\nexit 1\n", "python3 is 3.9, querying it needs"),
        ("#!/bin/sh\necho broken >&2\nexit 1\n", "its agent exited: broken"),
    ],
)
def test_why_there_is_none(tmp_path: Path, python: str | None, said: str) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    if python is not None:
        (tmp_path / "python3").write_text(python)
        (tmp_path / "python3").chmod(0o755)
    environment = [
        "env",
        "-i",
        f"PATH={tmp_path}",
        "/bin/sh",
        "-c",
        agent_command(FAR, visiting=True),
    ]
    pipe = ProcessPipe(environment)
    with pytest.raises(NoAgentError) as caught:
        AgentLink("far", pipe)
    pipe.end()
    error = explain_failure(FAR, "me", caught.value)
    assert isinstance(error, PreflightError | UnreachableError)
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.usefixtures("own_ssh")
def test_a_visit_over_ssh_on_a_host_without_motley(server: Server) -> None:
    host = server.host(trainer_command=None)
    connection, missing = visit_host(host)
    if not Path("/opt/motley/current/bin/python").exists():
        assert missing.startswith(
            "host far: Motley is not installed at /opt/motley; run: ansible-playbook"
        )
    assert connection.ask(describe_machine).identity == read_machine_id()
    assert visit_host(host)[0] is connection
    public = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "host.pub")], capture_output=True, text=True
    )
    assert connection.host_key == public.stdout.split()[1]


@pytest.mark.usefixtures("own_ssh")
def test_an_installed_agent_answers_where_there_is_one(server: Server) -> None:
    host = server.host()
    connection, missing = visit_host(host)
    assert missing == ""
    assert connection.python == connect_host(host).python != f"{BARE}/python3"
    assert connection.ask(describe_machine) == connect_host(host).ask(describe_machine)
