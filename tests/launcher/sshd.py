"""A real sshd of this user on a free loopback port, with keys of its own: no root, no mock."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.errors import LauncherError, UnreachableError
from launcher.hosts.ssh import connect_host
from launcher.inventory.hosts import Host
from tests.ports import free_port
from tests.waiting import wait_for

QUICK_KEYS = "KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org\n"
"""For sshd_config: with the default, sntrup761, clients' keys are a third of a test's CPU time."""


@dataclass
class Server:
    """An sshd that runs, and what a client needs to trust it and be trusted by it."""

    folder: Path
    port: int
    pid: int = 0

    @property
    def key(self) -> Path:
        """The private key that may log in."""
        return self.folder / "user"

    @property
    def known_hosts(self) -> Path:
        """Where this server's key stands."""
        return self.folder / "known_hosts"

    @property
    def config(self) -> Path:
        """The ssh_config that reaches it."""
        return self.folder / "ssh_config"

    @property
    def known_line(self) -> str:
        """What stands in known_hosts when it is right."""
        kind, key = (self.folder / "host.pub").read_text().split()[:2]
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"

    def host(self, name: str = "far", args: Sequence[str] = (), **settings: object) -> Host:
        """Return this machine as a host behind that server."""
        values: dict[str, object] = {
            "address": "127.0.0.1",
            "ssh_port": self.port,
            "user": getpass.getuser(),
            "ssh_args": ("-F", str(self.config), *args),
            "trainer_command": (str(Path(sys.executable).with_name("trainer")),),
            **settings,
        }
        return Host(name=name, **values)  # pyright: ignore[reportArgumentType]


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


@contextlib.contextmanager
def running_sshd(
    folder: Path, signing: Sequence[str] = (), host_kind: str = "ed25519"
) -> Iterator[Server]:
    """Run an sshd whose sessions end with it; `signing` makes its host key a certificate."""
    program = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd (openssh-server)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the service's start makes it else
    make_key(folder / "host", host_kind)
    make_key(folder / "user")
    if signing:  # ssh-keygen's arguments: by whom, for which names, until when
        sign = ["ssh-keygen", "-q", "-h", "-I", "host", *signing, str(folder / "host.pub")]
        subprocess.run(sign, check=True, stdin=subprocess.DEVNULL)
    certificate = f"HostCertificate {folder}/host-cert.pub\n" if signing else ""
    server = Server(folder, free_port())
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {server.port}\nHostKey {folder}/host\n{certificate}"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\n"
        "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\nAllowTcpForwarding yes\nMaxStartups 100\n"
        f"{QUICK_KEYS}"
    )
    server.known_hosts.write_text(server.known_line)
    server.config.write_text(
        f"Host *\n  IdentityFile {server.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {server.known_hosts}\n  GlobalKnownHostsFile none\n"
    )
    log = (folder / "sshd.log").open("wb")
    command = [program, "-D", "-e", "-f", str(folder / "sshd_config")]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        wait_for(lambda: _answers(server.port) or process.poll() is not None, "sshd", seconds=20.0)
        assert process.poll() is None, (folder / "sshd.log").read_text()
        server.pid = process.pid
        yield server
    finally:
        process.terminate()
        process.wait(20.0)
        log.close()


def refused(host: Host, kind: type[LauncherError] = UnreachableError) -> str:
    """Return why a host cannot be connected to: one line that begins with its name."""
    with pytest.raises(LauncherError) as caught:
        connect_host(host)
    assert type(caught.value) is kind, caught.value
    text = str(caught.value)
    assert text.startswith(f"host {host.name}: ")
    assert "\n" not in text
    return text


def end_sessions(server: Server) -> None:
    """Cut every connection to a server, as a cable that is pulled and plugged in again."""
    for session in _children(server.pid):
        for process in (session, *_children(session)):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"sshd:"):
                    os.kill(process, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            probe.settimeout(5.0)
            return probe.recv(4) == b"SSH-"
    except OSError:
        return False
