"""Logging in at a real SSH server: which of our keys it takes, and what is said of the others."""

import contextlib
import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.hosts.ssh import connect_host
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
    assert f"login as {user} refused (offered: {wrong}; skipped: {locked} (has a pass" in text
    assert f"ssh-add {locked}), {tmp_path}/broken (not a key that paramiko can read)" in text
    assert "none" not in text
    assert text.endswith("set ansible_user and ansible_ssh_private_key_file, or: ssh-copy-id")
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
        f"refused (no key to offer; skipped: {locked} (has a passphrase: ssh-add {locked}))"
    ) in refused(server.host())


def test_more_keys_than_the_host_looks_at(server: Server, tmp_path: Path) -> None:
    offer(server, *(make_key(tmp_path / f"key{number}") for number in range(7)), server.key)
    assert "; too many keys: set IdentitiesOnly" in refused(server.host())


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


@contextlib.contextmanager
def ssh_agent(path: Path) -> Iterator[dict[str, str]]:
    """Run an ssh-agent; yield the environment in which ssh-add reaches it."""
    ask = path.with_name("ask")
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o700)
    command = ["ssh-agent", "-D", "-a", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as agent:
        try:
            wait_for(path.exists, "the ssh-agent")
            asks = {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
            yield {**os.environ, "SSH_AUTH_SOCK": str(path), **asks}
        finally:
            agent.terminate()


def test_keys_of_an_ssh_agent_are_offered(server: Server, tmp_path: Path, authorized: Path) -> None:
    key = make_key(tmp_path / "held", passphrase="secret")
    with ssh_agent(tmp_path / "agent") as environment:
        subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True)
        authorized.write_text(key.with_suffix(".pub").read_text())
        server.config.write_text(
            f"Host *\n  IdentityAgent {tmp_path / 'agent'}\n  IdentityFile {key}\n"
            f"  UserKnownHostsFile {server.known_hosts}\n"
        )
        assert connect_host(server.host()).exists("/")


@pytest.mark.parametrize("held", ["in a file", "by an agent"])
def test_a_user_s_certificate_logs_in(
    server: Server, tmp_path: Path, authorized: Path, held: str
) -> None:
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "key")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", getpass.getuser()]
    subprocess.run([*sign, str(key.with_suffix(".pub"))], check=True)
    authorized.write_text(f"cert-authority {authority.with_suffix('.pub').read_text()}")
    offer(server, key)
    if held == "in a file":
        assert connect_host(server.host()).exists("/")
        return
    with ssh_agent(tmp_path / "agent") as environment:
        subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True)
        for path in (key, Path(f"{key}-cert.pub")):
            path.unlink()
        text = server.config.read_text()
        agent = f"  IdentityAgent {tmp_path / 'agent'}\n"
        server.config.write_text(
            text.replace("  IdentityAgent none\n", agent).replace("IdentitiesOnly yes", "")
        )
        assert connect_host(server.host()).exists("/")


def test_settings_that_fabric_cannot_follow_are_refused(server: Server) -> None:
    text = refused(server.host(args=("-o", "Ciphers=chacha20-poly1305@openssh.com")), ConfigError)
    assert "Fabric does not support ssh's ciphers: chacha20-poly1305@openssh.com" in text
    text = refused(server.host(args=("-o", "KnownHostsCommand=/bin/true %H")), ConfigError)
    assert "ssh's KnownHostsCommand" in text
