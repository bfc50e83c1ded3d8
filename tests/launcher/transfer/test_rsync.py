"""rsync's exit codes and command line, without rsync."""

from __future__ import annotations

import pytest

from launcher.errors import PartialError, PreflightError, UnreachableError
from launcher.transfer import rsync


@pytest.mark.parametrize(
    ("code", "text", "kind", "words"),
    [
        (255, "ssh: connect to host x port 22: No route to host", UnreachableError, "No route"),
        (255, "client_loop: send disconnect: Broken pipe", UnreachableError, "resumes where it"),
        (
            255,
            "@@@@@@@@@@@@@\n@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!  @\n"
            "SHA256:abc.\nOffending ED25519 key in /etc/ssh/known_hosts:3\n"
            "Host key for w1 has changed and you have requested strict checking.\n",
            UnreachableError,
            "Host key for w1 has changed",
        ),
        (12, "rsync: connection unexpectedly closed\n", UnreachableError, "resumes where it"),
        (127, "bash: line 1: rsync: command not found", PreflightError, "install the package"),
        (2, "protocol version mismatch -- is your shell clean?", PreflightError, "start-up file"),
        (1, "sudo: a password is required", PreflightError, "--tags share"),
        (23, "rsync: mkdir failed: Disk full", PartialError, "Disk full"),
    ],
)
def test_exit_codes_of_rsync_become_ours(
    code: int, text: str, kind: type[Exception], words: str
) -> None:
    error = rsync.explain_exit_code("w1", code, text)
    assert type(error) is kind
    assert words in str(error)
    assert "w1" in str(error)


def test_the_ssh_command_survives_rsyncs_own_splitting() -> None:
    place = rsync.Endpoint(
        "h", "/srv", "module", "inputs", "h", ("ssh", "-o", "ProxyCommand=a 'b' c")
    )
    assert place.options[1] == "'ssh' '-o' 'ProxyCommand=a ''b'' c'"
    assert place.address("x/") == "h::inputs/x/"
