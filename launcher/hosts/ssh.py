"""How the launcher reaches a host. Only this file distinguishes local from remote.

`connect` is the one place where a host becomes a connection. Over SSH that is a login with a
verified host key, and an agent (`agent.py`) behind it. A host that cannot be
reached or driven is refused here, with a line that says why.
"""

from __future__ import annotations

import atexit
import sys
import threading
from dataclasses import dataclass, field

from launcher.errors import UnreachableError
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import agent_command, explain
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.hosts.ssh_config import route_to
from launcher.hosts.ssh_pipe import SshPipe
from launcher.inventory.hosts import Host


def connect(host: Host) -> Connection:
    """Return the connection to a host; the existing one while it works, else a new one.

    Raises:
        UnreachableError: it cannot be reached, or its host key or the login is not accepted.
        PreflightError: it answers, but lacks Motley or its sudo rule, or has another version.
        ConfigError: ssh_config or the inventory's ssh arguments cannot be used.
    """
    if host.is_local:
        if not sys.platform.startswith("linux"):
            raise UnreachableError(f"host {host.name}: hosts need Linux, this is {sys.platform}")
        return LocalConnection()
    if host.connection == "none":
        raise UnreachableError(
            f"host {host.name}: the run's plan names it, but the inventory does not; give the "
            "inventory that has it: --inventory FILE"
        )
    with _POOL.guard:
        place = _POOL.places.setdefault(_key(host), _Place())
    with place.guard:
        if place.connection is not None and not place.connection.is_spent:
            place.connection.ensure()
        else:
            place.connection = RemoteConnection(host.name, lambda: _open_link(host))
        return place.connection


def accept_new_host_keys() -> None:
    """From now on record the keys of unknown hosts; changed keys stay refused."""
    _POOL.accept_new = True


def close_all() -> None:
    """Release every host."""
    with _POOL.guard:
        places = list(_POOL.places.values())
        _POOL.places.clear()
    for place in places:
        if place.connection is not None:
            place.connection.close()


def ssh_command(host: Host) -> list[str]:
    """Return the OpenSSH command, for programs like rsync, that verifies hosts as `connect` does.

    The destination to give it is `ssh_destination`.

    Raises:
        ConfigError: as `connect`.
    """
    return list(route_to(host, _POOL.accept_new).command)


def ssh_destination(host: Host) -> str:
    """Return the name that OpenSSH is given; an IPv6 address stands in brackets, as rsync wants."""
    name = host.address or host.name
    return f"[{name}]" if ":" in name else name


@dataclass
class _Place:
    """Where the connection of one host is kept."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    connection: RemoteConnection | None = None


@dataclass
class _Pool:
    guard: threading.Lock = field(default_factory=threading.Lock)
    places: dict[tuple[object, ...], _Place] = field(
        default_factory=dict[tuple[object, ...], _Place]
    )
    accept_new: bool = False


_POOL = _Pool()
atexit.register(close_all)


def _key(host: Host) -> tuple[object, ...]:
    """Return the key of a host's connection: equal keys share one, whatever else differs."""
    ssh = (host.name, host.address, host.ssh_port, host.user, host.ssh_key, host.ssh_args)
    return (*ssh, host.trainer_command)


def _open_link(host: Host) -> AgentLink:
    route = route_to(host, _POOL.accept_new)
    pipe = SshPipe(f"host {host.name}", route, agent_command(host))
    try:
        return AgentLink(host.name, pipe)
    except NoAgentError as error:
        raise explain(host, route.user, error) from None
