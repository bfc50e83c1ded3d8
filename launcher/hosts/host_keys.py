"""Which key a host must show: OpenSSH's known_hosts files, and what is said of any other key.

`ssh-keygen -F` finds the lines about a host, hashed names and patterns included (sshd(8),
"SSH_KNOWN_HOSTS FILE FORMAT").
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import UnreachableError
from launcher.hosts.ssh_config import SshRoute
from trainer.system.errors import plain_reason
from trainer.system.regular_file import read_file

CHANGED = "ITS HOST KEY HAS CHANGED"
"""In the message about a host that shows another key than the known one."""

_KRL = b"SSHKRL\n\0"
"""The first bytes of a binary revocation list (PROTOCOL.krl of OpenSSH)."""
_COMPARE = "at its console (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)"


class KnownKey(NamedTuple):
    """A line of a known_hosts file that is about a host."""

    file: str
    line: int
    marker: str
    """`@revoked`, `@cert-authority` or empty."""
    kind: str
    """The key's type, such as `ssh-ed25519`."""
    key: str
    """The key in base64."""


class HostKeys:
    """The keys that are known of one host: the policy of paramiko's client, which loads none."""

    def __init__(self, where: str, route: SshRoute) -> None:
        self._where = where
        self._route = route
        alias = route.first_value("hostkeyalias")
        bare = (alias or route.address).lower()
        self._name = bare if alias or route.port == 22 else f"[{bare}]:{route.port}"
        self._files = _known_hosts_paths(route, "userknownhostsfile")
        self._all_files = [*self._files, *_known_hosts_paths(route, "globalknownhostsfile")]
        self._marked = _find_keys(self._name, self._all_files)
        self.known = [entry for entry in self._marked if not entry.marker]
        """Those that it may show, if no line revokes them."""
        # As OpenSSH: a key that is known without a port is trusted with one, and what is revoked
        # for the name is revoked with any port.
        portless = () if bare == self._name else _find_keys(bare, self._all_files)
        self._portless = [e.key for e in portless if not e.marker and e.file in self._files]
        self._revoked = {e.key for e in (*self._marked, *portless) if e.marker == "@revoked"}

    def missing_host_key(self, client: Any, _hostname: str, key: Any) -> None:
        """Return if the host may show this key; paramiko calls it for each.

        Records the key of an unknown host if asked to.

        Raises:
            UnreachableError: it is unknown, changed or revoked, or cannot be recorded.
        """
        kind, text = key.get_name(), key.get_base64()
        ours = f"its host key {key.fingerprint}"
        least = int(self._route.first_value("requiredrsasize") or 0)  # paramiko has no such bound
        if kind == "ssh-rsa" and key.get_bits() < least:
            raise self._make_refusal(
                f"{ours} has {key.get_bits()} bits, fewer than ssh's RequiredRSASize {least}; give "
                f"{self._name} a longer one"
            )
        if self._is_revoked(kind, text):
            raise self._make_refusal(
                f"{ours} is revoked (@revoked in known_hosts, or RevokedHostKeys), so it may be "
                f"compromised; give {self._name} another key"
            )
        if text in self._portless or any(entry.key == text for entry in self.known):
            self._check_address(client, text)
            return
        if self.known:
            old = next((entry for entry in self.known if entry.kind == kind), self.known[0])
            raise self._make_refusal(
                f"{CHANGED}: {old.file}:{old.line} lists another key than the {key.fingerprint} it "
                f"shows; it was reinstalled, or the connection is intercepted. Compare {_COMPARE}; "
                "if it is right, remove the old key: "
                f"ssh-keygen -R {shlex.quote(self._name)} -f {shlex.quote(old.file)}"
            )
        if self._route.accept_new and self._files:
            self._record_key(f"{kind} {text}", ours)
            return
        accept = "set UserKnownHostsFile to a file that can keep it"
        if self._files:
            accept = "accept it: --accept-new-host-keys, or log in once with ssh"
        signed = [entry for entry in self._marked if entry.marker == "@cert-authority"]
        by = f"{signed[0].file}:{signed[0].line}" if signed else ""
        note = f"; the authority in {by} is for ssh alone (docs/ssh.md)" if by else ""
        short = kind.removeprefix("ssh-").partition("-")[0].upper()
        raise self._make_refusal(
            f"{ours} ({short}) is not known yet as {self._name}{note}; compare it {_COMPARE}, "
            f"then {accept}"
        )

    def _check_address(self, client: Any, key: str) -> None:
        """With CheckHostIP, refuse a key other than the one known of the address that answered.

        As ssh in its batch mode; ssh does not look at loopback addresses, which we do.
        """
        peer = client.get_transport().getpeername()
        behind = self._route.jumps or self._route.first_value("proxycommand")
        if self._route.first_value("checkhostip") != "yes" or behind or not peer:
            return  # behind a jump host or a ProxyCommand, as in ssh, there is no address
        address = str(peer[0])
        name = address if self._route.port == 22 else f"[{address}]:{self._route.port}"
        entries = _find_keys(name, self._all_files)
        known = [entry for entry in entries if not entry.marker]
        revoked = any(entry.marker == "@revoked" and entry.key == key for entry in entries)
        if revoked or (known and all(entry.key != key for entry in known)):
            old = next(entry for entry in entries if entry.marker != "@cert-authority")
            says = "revokes it" if revoked else "has another"
            raise self._make_refusal(
                f"CheckHostIP: its host key is known as {self._name}, but {old.file}:{old.line} "
                f"{says} for {address}: its name may lead to another machine now. Compare "
                f"{_COMPARE}; if it is right: ssh-keygen -R {shlex.quote(name)} -f "
                f"{shlex.quote(old.file)}"
            )

    def _make_refusal(self, why: str) -> UnreachableError:
        return UnreachableError(f"{self._where}: {why}")

    def _is_revoked(self, kind: str, key: str) -> bool:
        if key in self._revoked:
            return True
        file = self._route.first_value("revokedhostkeys")
        if file in (None, "/dev/null"):
            return False
        try:
            return _is_listed(Path(file).expanduser(), kind, key)
        except (OSError, ValueError) as error:  # ssh, too, trusts no key then
            raise self._make_refusal(f"RevokedHostKeys: {file}: {plain_reason(error)}") from None

    def _record_key(self, key: str, ours: str) -> None:
        path, name = Path(self._files[0]), self._name
        if self._route.first_value("hashknownhosts") == "yes":
            from paramiko import HostKeys as Hashing  # a login is under way: it is loaded

            name = Hashing.hash_host(name)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                line = f"{name} {key}\n".encode()
                file.write(line if file.read() in (b"", b"\n") else b"\n" + line)
        except OSError as error:
            raise self._make_refusal(
                f"{ours} cannot be written to {path}: {error.strerror}"
            ) from None


def _is_listed(path: Path, kind: str, key: str) -> bool:
    """Return whether a revocation list, binary or a public key a line, has a key.

    Raises:
        OSError, ValueError: it cannot be read, or not all of it be understood.
    """
    data = read_file(path)
    if data.startswith(_KRL):
        command = ["ssh-keygen", "-Q", "-f", "/dev/stdin"]
        with tempfile.NamedTemporaryFile() as shown:
            shown.write(f"{kind} {key}\n".encode())
            shown.flush()
            done = subprocess.run([*command, shown.name], input=data, capture_output=True)
        if done.returncode not in (0, 1):  # 1: revoked
            raise ValueError("is a damaged revocation list (ssh-keygen -Q)")
        return done.returncode == 1
    lines = [line.split() for line in data.splitlines()]
    listed = [words for words in lines if words and not words[0].startswith(b"#")]
    # ssh-keygen prints a line for each key that it can read, and passes over the others.
    command = ["ssh-keygen", "-l", "-f", "/dev/stdin"]
    text = b"\n".join(b" ".join(words) for words in listed)
    done = subprocess.run(command, input=text, capture_output=True)
    if done.stdout.count(b"\n") != len(listed) or not all(map(_is_key, listed)):
        raise ValueError("has a line that is not a public key")
    return any(words[1] == key.encode() for words in listed)


def _is_key(words: Sequence[bytes]) -> bool:
    """Return whether a line begins with a key, not with options, and is of the type it says."""
    kind, data = words[0], words[1] if len(words) > 1 else b""
    with contextlib.suppress(ValueError):
        return base64.b64decode(data, validate=True)[4:].startswith(kind)
    return False


def _known_hosts_paths(route: SshRoute, setting: str) -> list[str]:
    paths = " ".join(route.all_values(setting)).split()
    return [str(Path(path).expanduser()) for path in paths if path not in ("none", "/dev/null")]


def _find_keys(name: str, files: Sequence[str]) -> list[KnownKey]:
    found: list[KnownKey] = []
    for file in filter(os.path.isfile, files):
        command = ["ssh-keygen", "-F", name, "-f", file]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        number = 0
        for line in done.stdout.splitlines():
            if place := re.match(r"# Host .* found: line (\d+)", line):
                number = int(place[1])
                continue
            fields = line.split()
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            found.append(KnownKey(file, number, marker, *fields[1:3]))
    return found
