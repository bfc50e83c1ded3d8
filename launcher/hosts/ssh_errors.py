"""The reason of a failed ssh login, from its stderr, as one line with a remedy.

OpenSSH's messages are not translated. `ssh -v` adds the fingerprint of an unknown host key and the
user keys that were offered.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UnreachableError
from launcher.hosts.ssh_config import CONNECT_TIMEOUT

UNWRITTEN = "Failed to add the host to the list of known hosts"
"""In the log of a login whose host key was accepted and could not be recorded."""

CHANGED = "ITS HOST KEY HAS CHANGED"
"""In the message about a host that shows another key than the known one."""

_COMPARE = "at its console (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)"


def login_error(
    where: str, log: str, jumps: Sequence[str] = (), records: bool = True
) -> UnreachableError | None:
    """Return why the login on a host has failed, or None if the log does not say.

    Args:
        where: The host, for people.
        log: The stderr of ssh.
        jumps: The jump hosts before it.
        records: Whether ssh has a file for new host keys.
    """
    log = log.replace("\r", "")
    passed = len(re.findall(r"(?m)^Authenticated to ", log))
    if passed < len(jumps):
        where += f": jump host {jumps[passed]}"
    why = _host_key(log, records) or _stream(log, jumps[:passed]) or _login(log)
    return UnreachableError(f"{where}: {why}") if why else None


def shown_key(log: str) -> str:
    """Return the fingerprint of the last host key in the log of a login; empty if there is none."""
    shown = re.findall(r"Server host (?:key|certificate): \S+ (SHA256:[^\s,]+)", log)
    return shown[-1] if shown else ""


def _host_key(log: str, records: bool) -> str | None:
    ours = f"its host key {shown_key(log)}".rstrip()
    if found := re.search(r"host key for (\S+) was revoked", log):
        return (
            f"{ours} is revoked (@revoked in known_hosts, or RevokedHostKeys), so it may be "
            f"compromised; give {found[1]} another key"
        )
    if found := re.search(r"(?m)^Host key for (\S+) has changed", log):
        name, place = found[1], re.findall(r"(?m)^Offending .* in (.*):(\d+)$", log)
        file, line = place[-1] if place else ("known_hosts", "?")
        shown = re.findall(r"(?m)^(SHA256:\S+?)\.?$", log) or ["another"]
        return (
            f"{CHANGED}: {file}:{line} has another key than the {shown[-1]} it shows; "
            f"it was reinstalled, or the connection is intercepted. Compare {_COMPARE}; if it is "
            f"right, remove the old key: ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(file)}"
        )
    if found := re.search(r"(?m)^No (\S+) host key is known for (\S+) and", log):
        invalid = re.search(r"Certificate invalid: (.*)", log)
        note = f"; its certificate is not valid: {invalid[1]}" if invalid else ""
        accept = "accept it: --accept-new-host-keys, or log in once with ssh"
        if not records:
            accept = "set UserKnownHostsFile to a file that can keep it"
        return (
            f"{ours} ({found[1]}) is not known yet as {found[2]}{note}; compare it {_COMPARE}, "
            f"then {accept}"
        )
    if found := re.search(rf"(?m)^{UNWRITTEN} \((.*)\)", log):
        return f"{ours} cannot be written to {found[1]}"
    return None


def _stream(log: str, passed: Sequence[str]) -> str | None:
    """Return why there was no SSH connection: its name, its port, its greeting."""
    if found := re.search(r"(?m)^ssh: Could not resolve hostname (\S+): (.*)", log):
        return f"the name {found[1]} does not resolve ({found[2]}); set ansible_host"
    if found := re.search(r"(?m)^ssh: connect to host (\S+) (port \d+): (.*)", log):
        target, reason = f"{found[1]} {found[2]}", found[3]
        if "refused" in reason:
            return f"{target} is closed; is sshd running there?"
        if "timed out" in reason:
            seconds = f"within {CONNECT_TIMEOUT} s"
            return f"{target} does not answer {seconds}; is it up, and no firewall in between?"
        return f"{target}: {reason}"
    if found := re.search(r"(?m)^channel \d+: open failed: (.*)", log):
        through = f"through jump host {passed[-1]}: " if passed else ""
        return f"{through}{found[1]}"
    if "Permission denied" in log or "Too many authentication failures" in log:
        return None
    if re.search(r"(?m)timed out during banner exchange|^Connection to .* timed out", log):
        return f"no SSH greeting came within {CONNECT_TIMEOUT} s; is that port sshd's?"
    if found := re.search(r"(?m)^kex_exchange_identification: (.*)", log):
        said = re.search(r"kex_exchange_identification: banner line 0: (.*)", log)
        reason = f"it says {said[1]!r}" if said else found[1]
        return f"no SSH greeting came ({reason}); is that port sshd's, and not overloaded?"
    return None


def _login(log: str) -> str | None:
    refused = re.search(r"(?m)^(?:(\S+)@\S+: )?Permission denied \((.*)\)", log)
    if refused is None and "Too many authentication failures" not in log:
        return None
    log = log[max(0, log.rfind("Authenticating to ")) :]  # of the last host
    found = re.match(r"Authenticating to \S+ as '(.*)'", log)
    user = found[1] if found else (refused and refused[1]) or "?"
    keys = re.findall(r"Offering public key: (.*?) \S+ SHA256:\S+(.*)", log)
    offered = [f"{key} (agent)" if "agent" in rest else key for key, rest in keys]
    # ssh tries a key without knowing its public half if it has a passphrase and no .pub file.
    locked = re.findall(r"Server accepts key: (.*?) \S+ SHA256:\S+(?!.* agent)", log)
    locked += re.findall(r"Trying private key: (.*)", log)
    broken = re.findall(r'(?m)^Load key "(.*)": (.*)', log)
    left_out = [f"{key} ({reason})" for key, reason in broken]
    left_out += [
        f"{key} (has a passphrase: ssh-add {key})"
        for key in dict.fromkeys(locked)
        if Path(key).is_file() and key not in dict(broken)
    ]
    text = f"offered: {', '.join(offered)}" if offered else "no key to offer"
    if left_out:
        text += f"; left out: {', '.join(left_out)}"
    if refused is None:
        text += "; too many: set IdentitiesOnly"
    elif "publickey" not in refused[2].split(","):
        text += f"; it wants {refused[2]}"
    return (
        f"login as {user} refused ({text}); set ansible_user and ansible_ssh_private_key_file, or: "
        "ssh-copy-id"
    )
