"""Logging in at a real SSH server: whose key it must have, and which of ours it takes."""

import getpass
import os
import re
import subprocess
from pathlib import Path

import pytest
from keeping import wait_for
from sshd import Server, make_key, refused

from launcher.hosts import known_hosts
from launcher.hosts.ssh import accept_new_host_keys, connect, ssh_command, ssh_destination

pytestmark = pytest.mark.usefixtures("own_ssh")


def test_a_key_nobody_knows_is_refused_and_accepted_when_asked(server: Server) -> None:
    server.known_hosts.write_text("")
    assert "is not known yet" in refused(server.host())
    assert not known_hosts.own_file().exists()
    accept_new_host_keys()
    assert connect(server.host()).exists("/")
    assert known_hosts.own_file().read_text() == server.known_line
    assert server.known_hosts.read_text() == ""


def test_what_was_accepted_is_known_from_then_on(server: Server) -> None:
    server.known_hosts.write_text("")
    known_hosts.own_file().parent.mkdir(parents=True)
    known_hosts.own_file().write_text(server.known_line)
    assert connect(server.host()).exists("/")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_changed_key_is_always_refused(server: Server, tmp_path: Path, kind: str) -> None:
    name, public = make_key(tmp_path / "old", kind).with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"# mine\n[127.0.0.1]:{server.port} {name} {public}\n")
    accept_new_host_keys()
    text = refused(server.host())
    assert "ITS HOST KEY HAS CHANGED" in text
    assert f"{server.known_hosts}:2 says SHA256:" in text
    (remedy,) = re.findall(r"ssh-keygen -R .*$", text)
    subprocess.run(["sh", "-c", remedy], check=True, capture_output=True)
    assert connect(server.host()).exists("/")


def test_fabric_s_own_trust_is_switched_off(server: Server, tmp_path: Path) -> None:
    """StrictHostKeyChecking=no in the inventory does not open the door either."""
    server.known_hosts.write_text("")
    host = server.host(args=("-o", "StrictHostKeyChecking=no"))
    assert "is not known yet" in refused(host)
    command = [*ssh_command(host), ssh_destination(host), "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Host key verification failed" in done.stderr


def test_a_login_that_is_refused_names_the_keys(server: Server, tmp_path: Path) -> None:
    wrong, locked = make_key(tmp_path / "wrong"), make_key(tmp_path / "locked", passphrase="secret")
    server.config.write_text(
        server.config.read_text().replace(
            f"IdentityFile {server.key}", f"IdentityFile {wrong}\n  IdentityFile {locked}"
        )
    )
    text = refused(server.host())
    assert f"login as {getpass.getuser()} refused (offered: {wrong}; left out: {locked}" in text
    assert f"has a passphrase: ssh-add {locked}" in text
    text = refused(server.host(user="nobody-of-this-name"))
    assert "login as nobody-of-this-name refused" in text


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
