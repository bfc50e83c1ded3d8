"""How the launcher reaches a host. Only this file distinguishes local from remote.

`connect` is the only place that creates a connection to a host. Over SSH that is a login with a
verified host key, and an agent (`agent.py`) behind it. A host that cannot be reached or controlled
is refused here with the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.errors import UnreachableError
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import agent_command, explain
from launcher.hosts.host_keys import CHANGED
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.hosts.ssh_config import SshRoute, route_to
from launcher.hosts.visitor import archive, explain_visit, visitor_command
from launcher.inventory.hosts import Host

if TYPE_CHECKING:
    from launcher.hosts.ssh_pipe import SshPipe


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
    return _pooled(host, _key(host), _open_link)


def visit(host: Host) -> tuple[Connection, str]:
    """Return a connection to a host, and why no installed Motley answers; empty if one does.

    Then the agent has come along (`visitor.py`).

    Raises:
        LauncherError: as `connect`.
    """
    if host.is_local:
        return connect(host), ""
    connection = _pooled(host, ("visit", *_key(host)), _open_visit)
    return connection, _POOL.missing.get(_key(host), "")


def route_of(host: Host) -> SshRoute:
    """Return how ssh would reach a host, by ssh_config and the inventory; contacts nothing.

    Raises:
        ConfigError: as `connect`.
    """
    return route_to(host, _POOL.accept_new)


def host_key(host: Host) -> str:
    """Return the fingerprint of the verified key that a host showed at its last login."""
    return _POOL.host_keys.get(_key(host), "")


def is_changed_key(error: Exception) -> bool:
    """Whether a host was refused because its key is not the one that is known."""
    return CHANGED in str(error)


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
    host_keys: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])
    missing: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])


_POOL = _Pool()
atexit.register(close_all)


def _key(host: Host) -> tuple[object, ...]:
    """Return the key of a host's connection: equal keys share one, whatever else differs."""
    ssh = (
        host.name,
        host.address,
        host.ssh_port,
        host.user,
        host.ssh_key,
        host.ssh_first_args,
        host.ssh_args,
    )
    return (*ssh, host.trainer_command)


def _pooled(
    host: Host, key: tuple[object, ...], open_link: Callable[[Host], AgentLink]
) -> Connection:
    with _POOL.guard:
        place = _POOL.places.setdefault(key, _Place())
    with place.guard:
        if place.connection is not None and not place.connection.is_spent:
            place.connection.ensure()
        else:
            place.connection = RemoteConnection(host.name, lambda: open_link(host))
        return place.connection


def _open_link(host: Host) -> AgentLink:
    route = route_to(host, _POOL.accept_new)
    pipe = _logged_in(host, route, agent_command(host))
    try:
        return AgentLink(host.name, pipe)
    except NoAgentError as error:
        raise explain(host, route.user, error) from None


def _open_visit(host: Host) -> AgentLink:
    route = route_to(host, _POOL.accept_new)
    pipe = _logged_in(host, route, visitor_command(host))
    # Without Python nothing reads it; the error that the host prints says so.
    with contextlib.suppress(OSError):
        pipe.send(archive())
    try:
        link = AgentLink(host.name, pipe)
    except NoAgentError as error:
        raise explain_visit(host, error) from None
    marks = tuple(word for word in link.noise if word.startswith("motley: "))
    visits = any(word.startswith(("motley: missing", "motley: refused")) for word in marks)
    beside = "motley: beside" in marks
    why = explain(host, route.user, NoAgentError("", marks)) if visits and not beside else ""
    _POOL.missing[_key(host)] = str(why)
    return link


def _logged_in(host: Host, route: SshRoute, command: str) -> SshPipe:
    from launcher.hosts.ssh_pipe import SshPipe  # Fabric: 0.2 s that only a remote host costs

    pipe = SshPipe(f"host {host.name}", route, command)
    _POOL.host_keys[_key(host)] = pipe.host_key
    return pipe
