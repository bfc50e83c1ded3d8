"""Which key a host must have: OpenSSH's known_hosts files, read and, when asked, added to.

Format: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT". Host certificates (@cert-authority) are not
followed; a host that only such a line covers is unknown here. Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UnreachableError
from launcher.files import write_atomically


@dataclass(frozen=True)
class KnownKey:
    """A line that is about a host."""

    path: str
    line: int
    marker: str
    """`@revoked`, `@cert-authority` or empty."""
    kind: str
    key: bytes

    @property
    def place(self) -> str:
        """File and line for people."""
        return f"{self.path}:{self.line}"


def own_file() -> Path:
    """Return the file of ours that new hosts are written to."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "motley" / "known_hosts"


def entry_name(hostname: str, port: int, alias: str | None = None) -> str:
    """Return the name of a host in the files."""
    if alias is not None:
        return alias.lower()
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find(name: str, files: Iterable[str]) -> list[KnownKey]:
    """Return every line about a host; missing files are skipped."""
    found: list[KnownKey] = []
    for path in dict.fromkeys(files):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#") or not _is_about(name, fields[0]):
                continue
            with contextlib.suppress(binascii.Error, ValueError):
                key = base64.b64decode(fields[2], validate=True)
                found.append(KnownKey(path, number, marker, fields[1], key))
    return found


def verify(
    where: str, name: str, known: Iterable[KnownKey], kind: str, key: bytes, accept_new: bool
) -> None:
    """Accept a host whose key is the known one; `where` names the host in errors.

    With `accept_new` an unknown host is recorded and accepted as well.

    Raises:
        UnreachableError: the host is unknown, has another key, or one that was revoked.
    """
    entries = list(known)
    ours = fingerprint(key)
    for entry in entries:
        if entry.marker == "@revoked" and entry.key == key:
            raise UnreachableError(f"{where}: its host key {ours} is revoked in {entry.place}")
    plain = [entry for entry in entries if not entry.marker]
    if any(entry.key == key for entry in plain):
        return
    if plain:
        old = next((entry for entry in plain if entry.kind == kind), plain[0])
        raise UnreachableError(
            f"{where}: ITS HOST KEY HAS CHANGED: {old.place} says {fingerprint(old.key)}, it shows "
            f"{ours}; it was reinstalled, or the connection is intercepted. Compare at its console "
            "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub); if it is right, remove the old "
            f"key: ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(old.path)}"
        )
    if not accept_new:
        raise UnreachableError(
            f"{where}: its host key {ours} ({kind}) is not known yet; compare it at its console "
            f"(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then accept it: "
            "--accept-new-host-keys, or log in once with ssh"
        )
    try:
        remember(own_file(), name, kind, key)
    except OSError as error:
        raise UnreachableError(
            f"{where}: its host key cannot be written to {own_file()}: {error.strerror}"
        ) from None


def remember(path: Path, name: str, kind: str, key: bytes) -> None:
    """Add a line to a file, which is created if necessary; several launchers may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        text = base64.b64encode(key).decode("ascii")
        write_atomically(path, before + f"{name} {kind} {text}\n".encode())
    finally:
        os.close(folder)


def fingerprint(key: bytes) -> str:
    """Return a key's SHA-256 as ssh prints it."""
    digest = base64.b64encode(hashlib.sha256(key).digest()).decode("ascii")
    return f"SHA256:{digest.rstrip('=')}"


def _is_about(name: str, patterns: str) -> bool:
    if patterns.startswith("|1|"):
        _, _, salt, digest = [*patterns.split("|"), "", ""][:4]
        try:
            made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except (binascii.Error, ValueError):
            return False
    matches = False
    for pattern in patterns.lower().split(","):
        # fnmatch reads [...] as a set; here a bracket is part of a name with a port.
        escaped = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, escaped):
            if pattern.startswith("!"):
                return False
            matches = True
    return matches
