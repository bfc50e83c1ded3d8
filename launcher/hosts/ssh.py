"""How the launcher reaches a host. Only this file distinguishes local from remote.

`connect` is the only place that creates a connection to a host. Over SSH that is a login with a
verified host key, and an agent (`agent/server.py`) behind it. A host that cannot be reached or
controlled is refused here with the reason.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from operator import attrgetter

from launcher.agent.archive import agent_archive
from launcher.errors import UnreachableError
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import VISITS, agent_command, explain_failure, sudo_refusal
from launcher.hosts.host_keys import CHANGED
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.hosts.ssh_config import SshRoute, resolve_route
from launcher.inventory.hosts import Host


def connect_host(host: Host) -> Connection:
    """Return the connection to a host; the existing one while it works, else a new one.

    Raises:
        UnreachableError: it cannot be reached, or its host key or the login is not accepted.
        PreflightError: it answers, but lacks Motley or its sudo rule, or has another version.
        ConfigError: ssh_config or the inventory's ssh arguments cannot be used.
    """
    if host.is_local:
        if not sys.platform.startswith("linux"):
            raise UnreachableError(
                f"host {host.name}: hosts need Linux, and this machine runs {sys.platform}"
            )
        local = LocalConnection()
        local.host = host.name
        return local
    if host.connection == "none":
        raise UnreachableError(
            f"host {host.name}: the run's plan names it, but the inventory does not; give the "
            "inventory that lists it: --inventory FILE"
        )
    return _get_pooled_connection(host)


def visit_host(host: Host) -> tuple[Connection, str]:
    """Return a connection to a host, and why no installed Motley answers; empty if one does.

    Then the agent has come along (`bootstrap.py`).

    Raises:
        LauncherError: as `connect`.
    """
    if host.is_local:
        return connect_host(host), ""
    connection = _get_pooled_connection(host, visiting=True)
    if VISITS not in connection.marks:
        return connection, ""
    found = NoAgentError("", [mark for mark in connection.marks if mark != VISITS])
    return connection, str(explain_failure(host, find_route(host).user, found))


def find_route(host: Host) -> SshRoute:
    """Return how ssh would reach a host, by ssh_config and the inventory; contacts nothing.

    Its command is for programs like rsync, and verifies hosts as `connect` does.

    Raises:
        ConfigError: as `connect`.
    """
    return resolve_route(host, _POOL.accept_new)


def is_changed_key(error: Exception) -> bool:
    """Whether a host was refused because its key is not the one that is known."""
    return CHANGED in str(error)


def accept_new_host_keys() -> None:
    """From now on record the keys of unknown hosts; changed keys stay refused."""
    _POOL.accept_new = True


def close_all() -> None:
    """Release every host."""
    with _POOL.guard:
        connections = list(_POOL.connections.values())
        _POOL.connections.clear()
    for connection in connections:
        connection.close()


class _Pool:
    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.connections: dict[object, RemoteConnection] = {}
        self.accept_new = False


_POOL = _Pool()

_PLACE = attrgetter(
    *("name", "address", "ssh_port", "user", "ssh_key", "ssh_first_args", "ssh_args"),
    "trainer_command",
)
"""Key of a host's connection: hosts with equal keys share one, whatever else differs."""


def _get_pooled_connection(host: Host, visiting: bool = False) -> RemoteConnection:
    key = (visiting, _PLACE(host))
    with _POOL.guard:
        connection = _POOL.connections.get(key)
        if connection is None or connection.is_spent:
            connection = RemoteConnection(host.name, partial(_open_link, host, visiting))
            _POOL.connections[key] = connection
    connection.open_link()
    return connection


def _open_link(host: Host, visiting: bool) -> AgentLink:
    """Log in and start an agent, which brings its code along if it is `visiting`."""
    user = find_route(host).user
    try:
        return _start_agent(host, visiting)
    except NoAgentError as error:
        why = sudo_refusal(error)
        if not why or not (visiting or host.trainer_command):
            raise explain_failure(host, user, error) from None
    mark = f"motley: refused: {why}"
    try:
        link = _start_agent(host, visiting, is_refused=True)
    except NoAgentError as error:
        both = NoAgentError(str(error), [mark, *error.details])
        raise explain_failure(host, user, both) from None
    link.noise.appendleft(mark)
    return link


def _start_agent(host: Host, visiting: bool, is_refused: bool = False) -> AgentLink:
    from launcher.hosts.ssh_pipe import SshPipe  # Fabric: 0.2 s that only a remote host costs

    command = agent_command(host, visiting, is_refused)
    pipe = SshPipe(f"host {host.name}", find_route(host), command)
    if visiting:
        # Without Python nothing reads it; the error that the host prints says so.
        with contextlib.suppress(OSError):
            pipe.send(agent_archive())
    return AgentLink(host.name, pipe)
