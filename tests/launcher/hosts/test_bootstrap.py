"""Why no agent is started: a refusal of sudo is no lost connection, nor an agent that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import PreflightError, UnreachableError
from launcher.hosts import bootstrap
from launcher.hosts.bootstrap import agent_command, explain_failure, sudo_refusal
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.inventory.hosts import Host
from tests.launcher.agent_pipe import ProcessPipe

FAR = Host(name="far")
ANOTHER = "/opt/motley/current/bin/python: error while loading shared libraries: libz.so.1"


def fail_to_start(folder: Path, sudo: str, monkeypatch: pytest.MonkeyPatch) -> NoAgentError:
    """Start an agent with a program `sudo` that does what real ones do; return the error."""
    for name, code in (("python", "exit 9"), ("sudo", sudo)):
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(bootstrap, "PYTHON", str(folder / "python"))
    environment = ["env", "-i", f"PATH={folder}:/usr/bin:/bin", "/bin/sh", "-c"]
    pipe = ProcessPipe([*environment, agent_command(FAR)])
    with pytest.raises(NoAgentError) as caught:
        AgentLink("far", pipe)
    pipe.end()
    return caught.value


@pytest.mark.parametrize(
    "why",
    [
        "sudo: a password is required",
        "sudo: es wird ein Passwort benötigt",
        "sudo-rs: interactive authentication is required",
        "sudo: sorry, you must have a tty to run sudo",
        "Sorry, user me is not allowed to execute '/x' as motley on far.",
    ],
)
def test_a_refusal_of_sudo_is_no_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    code = f'echo "sudo: unable to resolve host far" >&2; echo "{why}" >&2; exit 1'
    error = fail_to_start(tmp_path, code, monkeypatch)
    assert sudo_refusal(error) == why
    shown = explain_failure(FAR, "me", error)
    assert isinstance(shown, PreflightError)
    assert f"host far: me may not become motley there ({why}); name me in" in str(shown)
    assert "--tags trainer" in str(shown)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ("python: No module named launcher.agent", PreflightError, "its version differs"),
        (ANOTHER, UnreachableError, f"its agent exited: {ANOTHER}"),
        ("", UnreachableError, "its agent exited"),
    ],
)
def test_an_agent_that_fails_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: type[Exception], message: str
) -> None:
    code = f'echo "{words}" >&2; exit 1' if words else "exit 1"
    error = fail_to_start(tmp_path, code, monkeypatch)
    assert sudo_refusal(error) == ""
    shown = explain_failure(FAR, "me", error)
    assert type(shown) is kind
    assert message in str(shown)


def test_a_refused_login_starts_what_is_left(tmp_path: Path) -> None:
    """The second login leaves sudo out and says what else there is."""
    command = agent_command(FAR, is_refused=True)
    assert "sudo" not in command
    pipe = ProcessPipe(["env", "-i", f"HOME={tmp_path}", "/bin/sh", "-c", command])
    with pytest.raises(NoAgentError) as caught:
        AgentLink("far", pipe)
    pipe.end()
    both = NoAgentError(str(caught.value), ["motley: refused: no", *caught.value.details])
    assert "me may not become motley there (no)" in str(explain_failure(FAR, "me", both))
