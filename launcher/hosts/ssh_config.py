"""The route of ssh to a host: read from `ssh -G`, so that the user's ssh_config applies as usual.

Include, Match, ProxyJump, ProxyCommand, IdentityFile and aliases have their meaning in ssh;
Ansible's variables go on its command line as Ansible puts them there. Host keys are verified
whatever StrictHostKeyChecking says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import ConfigError
from launcher.inventory.hosts import Host

CONNECT_TIMEOUT = 8.0
"""Seconds for each: TCP, the banner, the key exchange and the login."""

_DEADLINE = 10.0
"""Seconds for `ssh -G`, which may run what `Match exec` names."""

_PLAIN = re.compile(r"[A-Za-z0-9._@%+=:,\[\]/-]+")


@dataclass(frozen=True, kw_only=True)
class SshRoute:
    """One hop of ssh's route."""

    alias: str
    """The name given to ssh."""
    hostname: str
    port: int
    user: str
    identities: tuple[str, ...] = ()
    """Paths of private keys; they need not exist."""
    identities_only: bool = False
    agent: str | None = None
    """Socket of the ssh agent; None for none."""
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    proxy_command: str | None = None
    """As in ssh_config, with `%h` and the like."""
    jump: SshRoute | None = None
    """The host before this one."""
    arguments: tuple[str, ...] = field(default=(), repr=False)
    """Further arguments of ssh: the settings of this hop that are not listed here."""


def route_to(host: Host) -> SshRoute:
    """Return how ssh reaches a host of the inventory.

    Raises:
        ConfigError: ssh_config or Ansible's ssh arguments cannot be used, or there is no ssh.
    """
    arguments: list[str] = []
    if host.ssh_port is not None:
        arguments += ["-p", str(host.ssh_port)]
    if host.ssh_key is not None:
        key = Path(host.ssh_key).expanduser()
        if not key.is_file():  # ssh would continue without it
            raise ConfigError(f"host {host.name}: ansible_ssh_private_key_file: no file {key}")
        arguments += ["-i", str(key)]
    if host.user is not None:
        arguments += ["-l", host.user]
    return resolve(host.address or host.name, (*arguments, *host.ssh_args), f"host {host.name}")


def resolve(alias: str, arguments: Sequence[str], where: str) -> SshRoute:
    """Return the route of `ssh ARGUMENTS ALIAS`; `where` names the host in errors.

    Raises:
        ConfigError: as `route_to`.
    """
    if alias.startswith("-"):
        raise ConfigError(f"{where}: {alias!r} is no name of a host")
    program = shutil.which("ssh")
    if program is None:
        raise ConfigError(f"{where}: there is no `ssh` here; install openssh-client")
    try:
        done = subprocess.run(
            [program, "-G", "-T", *arguments, alias],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: `ssh -G {alias}` did not end in {_DEADLINE:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"{where}: ssh cannot use its settings: {said[-1]}")
    return _read(alias, tuple(arguments), done.stdout, where)


def ssh_arguments(
    route: SshRoute, known_hosts: Sequence[str], strictness: str = "yes"
) -> list[str]:
    """Return the OpenSSH command, without the destination, that uses the same verified route.

    `known_hosts` is read in addition to the files of the route itself.
    """
    options = [
        "BatchMode=yes",
        f"StrictHostKeyChecking={strictness}",
        f"UserKnownHostsFile={_files((*known_hosts, *route.known_hosts))}",
        f"ConnectTimeout={CONNECT_TIMEOUT:.0f}",
        "ServerAliveInterval=15",
        "ControlMaster=no",
        "ControlPath=none",
    ]
    if route.jump is not None:
        inner = (*ssh_arguments(route.jump, known_hosts, strictness), "-W", "[%h]:%p")
        # ssh passes this to the user's shell and expands % in it. Double quotes: rsync splits `-e`
        # at single ones and has no backslash escapes.
        hop = [*(part.replace("%", "%%") for part in inner[:-1]), inner[-1], route.jump.alias]
        options.append(f"ProxyCommand={' '.join(_quoted(part) for part in hop)}")
    flags = [part for option in options for part in ("-o", option)]
    return ["ssh", *flags, *_without_jump(route.arguments)]


def _read(alias: str, arguments: tuple[str, ...], text: str, where: str) -> SshRoute:
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)

    def one(key: str) -> str | None:
        value = values.get(key, ["none"])[0]
        return None if value.lower() == "none" else value

    jump = None
    if hops := one("proxyjump"):
        first, _, last = hops.rpartition(",")
        jump = _jump(last, first, arguments, where)
    agent = one("identityagent") or "SSH_AUTH_SOCK"
    if "none" in values.get("identityagent", ()):
        socket = None
    elif agent == "SSH_AUTH_SOCK" or agent.startswith("$"):
        socket = os.environ.get(agent.removeprefix("$").strip("{}"))
    else:
        socket = str(Path(agent).expanduser())
    files = [*values.get("userknownhostsfile", ()), *values.get("globalknownhostsfile", ())]
    return SshRoute(
        alias=alias,
        hostname=one("hostname") or alias,
        port=int(one("port") or 22),
        user=one("user") or "",
        identities=tuple(str(Path(path).expanduser()) for path in values.get("identityfile", ())),
        identities_only=one("identitiesonly") == "yes",
        agent=socket or None,
        known_hosts=tuple(
            str(Path(path).expanduser())
            for line in files
            for path in line.split()
            if path.lower() not in ("none", "/dev/null")
        ),
        host_key_alias=one("hostkeyalias"),
        proxy_command=one("proxycommand"),
        jump=jump,
        arguments=arguments,
    )


def _jump(hop: str, before: str, arguments: Sequence[str], where: str) -> SshRoute:
    """Return the route to `[user@]host[:port]`, which itself is reached through `before`."""
    found = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^]]+\]|[^:@]+)(?::(?P<port>\d+))?/?", hop
    )
    if found is None:
        raise ConfigError(f"{where}: ProxyJump {hop!r} is not [user@]host[:port]")
    own: list[str] = []
    if config := _config_file(arguments):
        own += ["-F", config]  # all that ssh passes on to a jump host
    if found["user"]:
        own += ["-l", found["user"]]
    if found["port"]:
        own += ["-p", found["port"]]
    if before:
        own += ["-J", before]
    return resolve(found["host"].strip("[]"), own, f"{where}: jump host {hop}")


def _config_file(arguments: Sequence[str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == "-F" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("-F") and len(argument) > 2:
            return argument[2:]
    return None


def _without_jump(arguments: Sequence[str]) -> list[str]:
    """Leave -J out: ssh refuses it together with the ProxyCommand made from it."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "-J":
            next(rest, None)
        elif not argument.startswith("-J"):
            kept.append(argument)
    return kept


def _files(paths: Sequence[str]) -> str:
    # ssh would expand % in them.
    names = [path.replace("%", "%%") for path in dict.fromkeys(paths)]
    return " ".join(f'"{name}"' if " " in name else name for name in names) or "none"


def _quoted(part: str) -> str:
    if _PLAIN.fullmatch(part) and "[" not in part:
        return part
    return '"' + re.sub(r'(["\\$`])', r"\\\1", part) + '"'


def shell_command(text: str) -> list[str]:
    """Return a ProxyCommand as arguments: ssh_config(5) defines it as a line for the shell."""
    return ["/bin/sh", "-c", f"exec {text}"]


def expand(command: str, route: SshRoute) -> str:
    """Return a ProxyCommand with its tokens filled in.

    Raises:
        ConfigError: a name has characters with a meaning in the shell.
    """
    tokens = {
        "%": "%",
        "h": route.hostname,
        "n": route.alias,
        "p": str(route.port),
        "r": route.user,
    }
    for name in (route.hostname, route.alias, route.user):
        if shlex.quote(name) != name:
            raise ConfigError(f"{name!r} cannot go into a ProxyCommand")
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), command)
