"""How ssh reaches a host: the operator's ssh_config, overridden by Motley's settings.

`ssh -G` reads the configuration, so Include, Match, ProxyJump, IdentityFile and aliases work as
usual; Ansible's variables are passed on its command line as Ansible does. `login.py` follows the
result with Fabric, rsync with OpenSSH's command. Host keys are verified regardless of
StrictHostKeyChecking, also on jump hosts.
"""

from __future__ import annotations

import getopt
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pwd import getpwuid

from launcher.errors import ConfigError
from launcher.files import default_state_folder, make_private_folder
from launcher.inventory.hosts import Host
from trainer.system.regular_file import read_text
from trainer.system.storage.atomic_file import write_atomically

CONNECT_TIMEOUT = 8
"""Seconds that a host may take for each: TCP, the greeting, the key exchange and the login."""

_DEADLINE = 10.0
"""Seconds for `ssh -G`, which may run what `Match exec` names."""

_MOST_JUMPS = 8
"""Jump hosts in a row: more are a circle, each with a ProxyJump of its own."""

_SETTINGS = {
    "BatchMode": "yes",  # no questions
    "NoHostAuthenticationForLocalhost": "no",
    "UpdateHostKeys": "no",
    "ServerAliveInterval": "15",
    "ControlMaster": "no",  # another program's login was verified by other rules
    "ControlPath": "none",
    "ControlPersist": "no",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}

_GOES_ON = re.compile(
    r"(?:(?:exec|sudo|doas|env|-\S+|\w+=\S*)\s+)*(?:\S*/)?"
    r"(?:ssh|autossh|mosh|telnet|docker|podman|lxc|incus|kubectl|nsenter|machinectl|wsl)\s"
)
"""Matches a RemoteCommand that continues on another machine or in a container."""

_OPTIONS = "1246AB:CD:E:F:GI:J:KL:MNO:P:Q:R:S:TVW:XYab:c:e:fgi:kl:m:no:p:qstvw:xy"
_LEFT_OUT = frozenset(f"-{letter}" for letter in "AEFGMNOQSVWXYfnstwy")
"""Options that change what ssh does, not how it gets there, and `-F`, which is read separately."""


@dataclass(frozen=True, kw_only=True)
class SshRoute:
    """How ssh reaches a host."""

    command: tuple[str, ...]
    """OpenSSH's, without the destination: it verifies host keys and never asks anything."""
    destination: str
    """The name given to ssh."""
    address: str
    """Where ssh connects to: ssh_config's HostName."""
    port: int
    user: str
    jumps: tuple[str, ...]
    """The jump hosts, in the order of the route, as ssh_config or `-J` names them."""
    settings: Mapping[str, Sequence[str]]
    """Every setting of ssh in lower case with its values, as `ssh -G` prints them."""
    accept_new: bool
    """Whether the keys of unknown hosts are recorded."""

    def first_value(self, name: str) -> str | None:
        """Return the first value of a setting; None if it is absent or `none`."""
        return next(iter(self.all_values(name)), None)

    def all_values(self, name: str) -> list[str]:
        """Return the values of a setting; none for `none`."""
        return [value for value in self.settings.get(name, ()) if value.lower() != "none"]


def resolve_route(host: Host, accept_new: bool = False) -> SshRoute:
    """Return how ssh reaches a host of the inventory.

    With `accept_new`, ssh records the keys of unknown hosts; changed keys stay refused.

    Raises:
        ConfigError: ssh_config or Ansible's ssh arguments cannot be used, or there is no ssh.
    """
    where = f"host {host.name}"
    destination = host.address or host.name
    if destination.startswith("-"):
        raise ConfigError(f"{where}: {destination!r} is not a host name")
    program = shutil.which("ssh")
    if program is None:
        raise ConfigError(f"{where}: `ssh` is missing here; install openssh-client")
    arguments, file = _inventory_arguments(host, where)
    named = [] if file is None else ["-F", file]
    # What ssh reads without `-F`; it does not ask the variable HOME.
    own = [f"{getpwuid(os.getuid()).pw_dir}/.ssh/config", "/etc/ssh/ssh_config"]
    settings = {
        **_SETTINGS,
        "StrictHostKeyChecking": "accept-new" if accept_new else "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
    }
    # The command line counts before the file, and in each the first value. ssh passes nothing on
    # to a jump host but `-F`, so the settings are in both.
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    try:
        config = _write_config(settings, own if file is None else [file])
    except OSError as error:
        raise ConfigError(f"{where}: ssh's settings: {error.filename}: {error.strerror}") from None
    command = (program, "-T", *options, *arguments, "-F", str(config))
    # With the operator's files themselves, so that a mistake in them is named with its line.
    return _read_route((program, *arguments, *named), command, destination, where, accept_new)


def resolve_jump(route: SshRoute, where: str) -> SshRoute | None:
    """Return how ssh reaches the last jump host before a host; None if there is none.

    Raises:
        ConfigError: as `resolve_route`.
    """
    if not route.jumps:
        return None
    if where.count(": jump host ") == _MOST_JUMPS:
        raise ConfigError(f"{where}: their ProxyJump settings form a loop")
    *before, last = route.jumps
    program, *_, flag, config = route.command
    # ssh passes nothing else on; the first jump host's own ProxyJump counts.
    command = (program, "-T", *(["-J", ",".join(before)] if before else []), flag, config)
    uri = last if last.startswith("ssh://") else f"ssh://{last}"
    return _read_route(command, command, uri, f"{where}: jump host {last}", route.accept_new)


def _read_route(
    asked: Sequence[str], command: tuple[str, ...], destination: str, where: str, accept_new: bool
) -> SshRoute:
    try:
        done = subprocess.run(
            [*asked, "-G", "--", destination],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=_DEADLINE,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: `ssh -G` did not end within {_DEADLINE:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"{where}: ssh cannot use its settings: {lines[0].strip()}")
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    remote = settings.get("remotecommand", ["none"])[0]
    if _GOES_ON.match(remote):
        raise ConfigError(
            f"{where}: RemoteCommand {remote!r} goes on from {settings['hostname'][0]}, and "
            "commands are run on the host where ssh ends; name that host as HostName, "
            "and the machines before it as ProxyJump"
        )
    jumps = settings.get("proxyjump", ["none"])[0]
    return SshRoute(
        command=command,
        destination=destination,
        address=settings.get("hostname", [destination])[0],
        port=int(settings["port"][0]),
        user=settings["user"][0],
        jumps=() if jumps == "none" else tuple(jumps.split(",")),
        settings=settings,
        accept_new=accept_new,
    )


def _inventory_arguments(host: Host, where: str) -> tuple[list[str], str | None]:
    """Return the arguments of ssh that the inventory gives, and the file that `-F` names."""
    first, first_file = _reach_options(host.ssh_first_args, where)
    more, file = _reach_options(host.ssh_args, where)
    key = host.ssh_key and Path(host.ssh_key).expanduser()
    if key and not key.is_file():  # ssh would continue without it
        raise ConfigError(f"{where}: ansible_ssh_private_key_file: no file {key}")
    named = (("-p", host.ssh_port), ("-i", key), ("-l", host.user))
    own = [word for flag, value in named if value is not None for word in (flag, str(value))]
    return [*first, *own, *more], first_file if file is None else file


def _reach_options(words: Sequence[str], where: str) -> tuple[list[str], str | None]:
    """Return ssh's options that say how to get there, and the file that `-F` names."""
    try:
        options, rest = getopt.getopt(list(words), _OPTIONS)
    except getopt.GetoptError as error:
        raise ConfigError(f"{where}: Ansible's ssh arguments: {error}") from None
    if rest:
        raise ConfigError(f"{where}: Ansible's ssh arguments: {rest[0]} is not an option")
    kept = [(option, value) for option, value in options if option not in _LEFT_OUT]
    return [word for pair in kept for word in pair if word], dict(options).get("-F")


def _write_config(settings: dict[str, str], files: Sequence[str]) -> Path:
    """Write a configuration: the settings, then copies of these files."""
    # Include would demand permissions that `-F` does not.
    parts = ["\n".join(("Host *", *(f"{name} {value}" for name, value in settings.items())))]
    for file in files:
        path = Path(file)
        if file != "none" and path.is_file():
            parts += ["Match all", read_text(path, errors="surrogateescape")]
    data = "\n".join([*parts, ""]).encode(errors="surrogateescape")
    config = default_state_folder() / "ssh" / hashlib.sha256(data).hexdigest()[:16]
    if not config.exists():
        make_private_folder(config.parent)
        write_atomically(config, data)
    return config
