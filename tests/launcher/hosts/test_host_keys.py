"""Which key a host must show, at real SSH servers: known, unknown, changed, revoked, signed."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.hosts.ssh import accept_new_host_keys, close_all, connect_host, find_route
from launcher.inventory.hosts import Host
from tests.launcher.sshd import Server, make_key, refused, running_sshd

pytestmark = pytest.mark.usefixtures("own_ssh")


def by_rsync_s_command(host: Host) -> str:
    """Return what the command that rsync gets says of a host that it must not log in to."""
    command = [*find_route(host).command, "127.0.0.1", "echo", "in"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (255, "")
    return done.stderr


def fingerprint(key: Path) -> str:
    command = ["ssh-keygen", "-lf", str(key)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]


def test_an_unknown_key_is_refused_and_recorded_when_asked(server: Server, tmp_path: Path) -> None:
    server.known_hosts.write_text("")
    text = refused(server.host())
    assert f"its host key {fingerprint(server.folder / 'host.pub')} (ED25519) is not known" in text
    assert f"as [127.0.0.1]:{server.port}; compare it at its console" in text
    assert "--accept-new-host-keys" in text
    assert server.known_hosts.read_text() == ""
    flags = ["--accept-new-host-keys", "-i", str(tmp_path / "absent.yml")]
    assert cli.run(["doctor", *flags]) == 2
    assert connect_host(server.host()).exists("/")
    assert server.known_hosts.read_text() == server.known_line


def test_a_file_that_cannot_keep_a_key_is_said(server: Server) -> None:
    accept_new_host_keys()
    args = ("-o", "UserKnownHostsFile=/proc/none/known_hosts")
    assert "cannot be written to /proc/none/known_hosts" in refused(server.host(args=args))


def test_without_a_file_for_keys_there_is_another_remedy(server: Server) -> None:
    """Often seen beside StrictHostKeyChecking=no, which is refused: keys would be lost."""
    text = refused(server.host(args=("-o", "UserKnownHostsFile=/dev/null")))
    assert text.endswith("then set UserKnownHostsFile to a file that can keep it")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_changed_key_is_always_refused(server: Server, tmp_path: Path, kind: str) -> None:
    """A key of another kind is no first contact either."""
    name, public = make_key(tmp_path / "old", kind).with_suffix(".pub").read_text().split()[:2]
    line = f"# mine\n[127.0.0.1]:{server.port} {name} {public}\n"
    server.known_hosts.write_text(line)
    assert "ITS HOST KEY HAS CHANGED" in refused(server.host())
    accept_new_host_keys()
    text = refused(server.host())
    assert f"ITS HOST KEY HAS CHANGED: {server.known_hosts}:2 lists another key" in text
    assert f"than the {fingerprint(server.folder / 'host.pub')} it shows" in text
    assert "Host key verification failed" in by_rsync_s_command(server.host())
    assert server.known_hosts.read_text() == line
    (remedy,) = re.findall(r"ssh-keygen -R .*$", text)
    subprocess.run(["sh", "-c", remedy], check=True, capture_output=True)
    assert connect_host(server.host()).exists("/")


def test_a_revoked_key_is_refused_even_if_it_is_known(server: Server) -> None:
    server.known_hosts.write_text(
        f"{server.known_line}@revoked * {server.known_line.split(' ', 1)[1]}"
    )
    accept_new_host_keys()
    text = refused(server.host())
    assert f"its host key {fingerprint(server.folder / 'host.pub')} is revoked" in text
    assert f"give [127.0.0.1]:{server.port} another key" in text
    assert "Host key verification failed" in by_rsync_s_command(server.host())


@pytest.mark.parametrize("marker", ["", "@revoked "])
def test_with_check_host_ip_the_address_counts_too(
    server: Server, tmp_path: Path, marker: str
) -> None:
    """The key is right for the name; by the address another machine answered so far."""
    ours = server.known_line.split(" ", 1)[1]
    other = ours if marker else make_key(tmp_path / "other").with_suffix(".pub").read_text()
    named = f"[localhost]:{server.port} {ours}"
    server.known_hosts.write_text(f"{named}{marker}[127.0.0.1]:{server.port} {other}")
    plain = ("-o", "HostName=localhost", "-4")
    checked = (*plain, "-o", "CheckHostIP=yes")
    text = refused(server.host(args=checked))
    says = "revokes it" if marker else "has another"
    place = f"{server.known_hosts}:2 {says} for 127.0.0.1"
    assert f"known as [localhost]:{server.port}, but {place}" in text
    assert connect_host(server.host(args=plain)).exists("/")
    close_all()
    for line in (named, f"{named}[127.0.0.1]:{server.port} {ours}"):
        server.known_hosts.write_text(line)
        assert connect_host(server.host(args=checked)).exists("/")
        close_all()


@pytest.mark.parametrize("way", ["arguments", "configuration"])
def test_no_setting_of_the_operator_s_opens_the_door(server: Server, way: str) -> None:
    server.known_hosts.write_text("")
    # An operator's unsafe settings, which must not open anything.
    settings = ("StrictHostKeyChecking no", "NoHostAuthenticationForLocalhost yes")
    args: Sequence[str] = ()
    if way == "arguments":
        args = [word for setting in settings for word in ("-o", setting.replace(" ", "="))]
    else:
        server.config.write_text("\n".join(("Host *", *settings, server.config.read_text())))
    gate = f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n"
    server.config.write_text(server.config.read_text() + gate)
    assert "is not known yet" in refused(server.host(args=args))
    assert "jump host gate: its host key" in refused(server.host(args=(*args, "-J", "gate")))
    for jump in ((), ("-J", "gate")):
        assert "Host key verification failed" in by_rsync_s_command(
            server.host(args=(*args, *jump))
        )
    assert server.known_hosts.read_text() == ""


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[Server]:
    """Yield an sshd that an authority vouches for."""
    authority = make_key(tmp_path / "authority")
    (tmp_path / "signed").mkdir()
    signing = ["-s", str(authority), "-n", "127.0.0.1"]
    with running_sshd(tmp_path / "signed", signing) as made:
        made.known_hosts.write_text(
            f"@cert-authority * {authority.with_suffix('.pub').read_text()}"
        )
        yield made
        close_all()


def test_an_authority_s_word_is_for_ssh_alone(signed: Server, tmp_path: Path) -> None:
    """paramiko knows no certificates of hosts: the way out is to record the host's own key."""
    text = refused(signed.host())
    assert f"the authority in {signed.known_hosts}:1 is for ssh alone (docs/ssh.md)" in text
    assert "--accept-new-host-keys" in text
    accept_new_host_keys()
    assert connect_host(signed.host()).exists("/")
    assert signed.known_hosts.read_text().endswith(signed.known_line)
    close_all()
    connect_host(signed.host())


def test_a_revocation_list_counts(server: Server, tmp_path: Path) -> None:
    public, listed = server.folder / "host.pub", tmp_path / "revoked"
    args = ("-o", f"RevokedHostKeys={listed}")
    assert f"RevokedHostKeys: {listed}: No such file" in refused(server.host(args=args))
    listed.write_text(make_key(tmp_path / "other").with_suffix(".pub").read_text())
    assert connect_host(server.host(args=args)).exists("/")
    for make in (
        lambda: listed.write_text(public.read_text()),
        lambda: subprocess.run(["ssh-keygen", "-qkf", str(listed), str(public)], check=True),
    ):
        close_all()
        make()
        assert "is revoked" in refused(server.host(args=args))


def ssh_says(host: Host) -> bool:
    """Return whether OpenSSH itself logs in."""
    command = [*find_route(host).command, "127.0.0.1", "echo", "in"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 255), done
    return done.stdout == "in\n"


def binary_list(folder: Path, public: Path) -> bytes:
    path = folder / "krl"
    subprocess.run(["ssh-keygen", "-qkf", str(path), str(public)], check=True)
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        "nothing",
        "a comment, an empty line and spaces",
        "a binary list",
        "a binary list cut off",
        "a key cut off",
        "a key of another type",
        "options before the key",
        "a line end within a key",
        "a character that is not base64",
        "a type without a key",
        "text",
        "an unknown type",
    ],
)
def test_a_revocation_list_that_cannot_be_read_whole_trusts_no_key(
    server: Server, tmp_path: Path, damage: str
) -> None:
    """As OpenSSH has it, which is asked as well: none of these lists has the server's key."""
    other = make_key(tmp_path / "other").with_suffix(".pub")
    kind, key = other.read_text().split()[:2]
    krl = binary_list(tmp_path, other)
    lists = {
        "nothing": b"",
        "a comment, an empty line and spaces": f"# old\n\n  {kind} {key} of a box\n".encode(),
        "a binary list": krl,
        "a binary list cut off": krl[:-20],
        "a key cut off": f"{kind} {key[:40]}\n".encode(),
        "a key of another type": f"ssh-rsa {key}\n".encode(),
        "options before the key": f"restrict {kind} {key}\n".encode(),
        "a line end within a key": f"{kind} {key[:40]}\n{key[40:]}\n".encode(),
        "a character that is not base64": f"{kind} {key[:8]}*{key[8:]}\n".encode(),
        "a type without a key": f"{kind}\n".encode(),
        "text": b"see the other list\n",
        "an unknown type": f"ssh-foo {key}\n".encode(),
    }
    listed = tmp_path / "revoked"
    listed.write_bytes(lists[damage])
    host = server.host(args=("-o", f"RevokedHostKeys={listed}"))
    is_whole = damage in list(lists)[:3]
    assert ssh_says(host) == is_whole
    if is_whole:
        assert connect_host(host).exists("/")
        return
    what = "is a damaged revocation list" if "binary" in damage else "has a line that is not a"
    assert f"RevokedHostKeys: {listed}: {what}" in refused(host)


def test_a_revocation_list_that_is_no_file_trusts_no_key(server: Server, tmp_path: Path) -> None:
    """A pipe would be waited for, and a device read without an end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((pipe, "is a named pipe"), ("/dev/zero", "is a device"), (tmp_path, "is a")):
        args = ("-o", f"RevokedHostKeys={path}")
        assert f"RevokedHostKeys: {path}: {what}" in refused(server.host(args=args))
    host = server.host(args=("-o", "RevokedHostKeys=/dev/null"))
    assert ssh_says(host)
    assert connect_host(host).exists("/")


@pytest.mark.parametrize("file", ["of the user", "of the system"])
def test_a_key_that_is_revoked_for_a_name_is_so_with_any_port(
    server: Server, tmp_path: Path, file: str
) -> None:
    key = server.known_line.split(" ", 1)[1]
    other = tmp_path / "system"
    host = server.host(args=("-o", f"GlobalKnownHostsFile={other}"))

    def write(known: str, revoked: str) -> None:
        close_all()
        server.known_hosts.write_text(known + (revoked if file == "of the user" else ""))
        other.write_text(revoked if file == "of the system" else "")

    write(f"127.0.0.1 {key}", f"@revoked 127.0.0.1 {key}")
    assert not ssh_says(host)
    accept_new_host_keys()
    assert "is revoked" in refused(host)
    # Nor beside a line with the port, which OpenSSH would take.
    write(server.known_line, f"@revoked 127.0.0.1 {key}")
    assert "is revoked" in refused(host)
    write(server.known_line, f"@revoked 127.0.0.2 {key}")
    assert connect_host(host).exists("/")


def test_a_key_shorter_than_ssh_wants_is_refused(tmp_path: Path) -> None:
    with running_sshd(tmp_path, host_kind="rsa") as server:
        host = server.host(args=("-o", "RequiredRSASize=4096"))
        assert not ssh_says(host)
        assert "has 3072 bits, fewer than ssh's RequiredRSASize 4096" in refused(host)
        assert connect_host(server.host()).exists("/")
        close_all()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("127.0.0.1", ()),  # without the port
        ("the-box", ("-o", "HostKeyAlias=The-Box")),
        ("127.*,!127.0.0.2", ()),
    ],
)
def test_names_of_a_key_are_those_of_ssh(server: Server, name: str, args: tuple[str, ...]) -> None:
    key = server.known_line.split(" ", 1)[1]
    server.known_hosts.write_text(f"{name} {key}")
    assert connect_host(server.host(args=args)).exists("/")
    command = [*find_route(server.host(args=args)).command, "127.0.0.1", "echo", "in"]
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == b"in\n"


@pytest.mark.parametrize("before", ["", "# mine", "# mine\n"])
def test_a_new_key_is_recorded_as_ssh_does(server: Server, before: str) -> None:
    server.known_hosts.write_text(before)
    accept_new_host_keys()
    connect_host(server.host(args=("-o", "HashKnownHosts=yes")))
    (line,) = server.known_hosts.read_text().removeprefix("# mine").split("\n")[before != "" : -1]
    assert line.startswith("|1|")
    find = ["ssh-keygen", "-F", f"[127.0.0.1]:{server.port}", "-f", str(server.known_hosts)]
    assert subprocess.run(find, capture_output=True).returncode == 0


def test_every_client_that_is_made_verifies(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fabric's own policy adds every key; ours stands on each client before it connects."""
    from paramiko import SSHClient

    from launcher.hosts.host_keys import HostKeys

    seen: list[tuple[type, int]] = []
    real: Any = SSHClient.connect

    def connect_noted(self: Any, *args: object, **kwargs: object) -> object:
        seen.append((type(self._policy), len(self._host_keys) + len(self._system_host_keys)))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SSHClient, "connect", connect_noted)
    gate = f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n"
    server.config.write_text(server.config.read_text() + gate)
    assert connect_host(server.host(args=("-J", "gate"))).exists("/")
    assert seen == [(HostKeys, 0), (HostKeys, 0)]
