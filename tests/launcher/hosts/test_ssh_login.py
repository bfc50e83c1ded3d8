"""Logging in at a real SSH server: which of our keys it takes, and what is said of the others."""

import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.hosts.ssh import connect
from tests.launcher.sshd import Server, make_key, refused
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_ssh")


@pytest.fixture
def authorized(server: Server) -> Iterator[Path]:
    """Yield the server's authorized_keys, which is as before afterwards."""
    keys = server.folder / "authorized_keys"
    before = keys.read_text()
    yield keys
    keys.write_text(before)


def offer(server: Server, *keys: Path) -> None:
    lines = "".join(f"  IdentityFile {key}\n" for key in keys)
    server.config.write_text(
        server.config.read_text().replace(f"  IdentityFile {server.key}\n", lines)
    )


def test_a_login_that_is_refused_names_the_keys(
    server: Server, tmp_path: Path, authorized: Path
) -> None:
    wrong, locked = make_key(tmp_path / "wrong"), make_key(tmp_path / "locked", passphrase="secret")
    (tmp_path / "broken").write_text("no key\n")
    (tmp_path / "broken").chmod(0o600)
    offer(server, wrong, locked, tmp_path / "broken", tmp_path / "none")
    user = getpass.getuser()
    text = refused(server.host())
    assert f"login as {user} refused (offered: {wrong}, {locked}; left out: {tmp_path}/bro" in text
    assert "passphrase" not in text  # it would not help
    assert "none" not in text
    assert text.endswith("set ansible_user and ansible_ssh_private_key_file, or: ssh-copy-id")
    authorized.write_text(locked.with_suffix(".pub").read_text())
    assert f", {locked} (has a passphrase: ssh-add {locked})" in refused(server.host())
    text = refused(server.host(user="nobody-of-this-name"))
    assert "login as nobody-of-this-name refused" in text


def test_an_old_key_with_a_passphrase_does_not_show_its_public_half(
    server: Server, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    command = ["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "secret", "-f", str(locked)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    locked.with_suffix(".pub").unlink()
    offer(server, locked)
    assert (
        f"refused (no key to offer; left out: {locked} (has a passphrase: ssh-add {locked}))"
    ) in refused(server.host())


def test_more_keys_than_the_host_looks_at(server: Server, tmp_path: Path) -> None:
    offer(server, *(make_key(tmp_path / f"key{number}") for number in range(7)), server.key)
    assert "; too many: set IdentitiesOnly" in refused(server.host())


def test_without_a_key_that_is_said(server: Server, tmp_path: Path) -> None:
    offer(server, tmp_path / "none")
    assert "refused (no key to offer); set" in refused(server.host())


@pytest.mark.parametrize("hop", ["target", "jump host"])
def test_the_hop_that_refuses_is_named(server: Server, tmp_path: Path, hop: str) -> None:
    jump = f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n  User stranger\n"
    if hop == "target":
        jump = jump.replace("stranger", getpass.getuser())
    server.config.write_text(jump + server.config.read_text())
    args = ("-J", "gate")
    if hop == "jump host":
        assert "host far: jump host gate: login as stranger refused (offered: " in refused(
            server.host(args=args)
        )
    else:
        assert "host far: login as stranger refused (offered: " in refused(
            server.host(args=args, user="stranger")
        )


def test_keys_of_an_ssh_agent_are_offered(server: Server, tmp_path: Path) -> None:
    key = make_key(tmp_path / "held", passphrase="secret")
    socket_path = tmp_path / "agent"
    command = ["ssh-agent", "-D", "-a", str(socket_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as agent:
        try:
            wait_for(socket_path.exists, "the ssh-agent")
            environment = {
                **os.environ,
                "SSH_AUTH_SOCK": str(socket_path),
                "SSH_ASKPASS": str(tmp_path / "ask"),
                "SSH_ASKPASS_REQUIRE": "force",
            }
            (tmp_path / "ask").write_text("#!/bin/sh\necho secret\n")
            (tmp_path / "ask").chmod(0o700)
            subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True)
            keys = server.folder / "authorized_keys"
            before = keys.read_text()
            keys.write_text(before + key.with_suffix(".pub").read_text())
            server.config.write_text(
                f"Host *\n  IdentityAgent {socket_path}\n  IdentityFile {key}\n"
                f"  UserKnownHostsFile {server.known_hosts}\n"
            )
            assert connect(server.host()).exists("/")
            keys.write_text(before)
        finally:
            agent.terminate()
