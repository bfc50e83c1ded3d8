"""How the launcher reaches a host. Only this file distinguishes local from remote, and uses SSH.

`connect` is the one place where a host becomes a connection. Over SSH that is a login with a
verified host key, and an agent (`agent.py`) behind one channel. A host that cannot be
reached or driven is refused here, with a line that says why.
"""

from __future__ import annotations

import atexit
import logging
import socket
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import LauncherError, UnreachableError
from launcher.hosts import known_hosts, ssh_config
from launcher.hosts.base import Connection
from launcher.hosts.bootstrap import agent_command, explain
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from launcher.hosts.ssh_config import CONNECT_TIMEOUT, SshRoute
from launcher.hosts.ssh_pipe import Hop, ProxyProcess, SshPipe
from launcher.inventory.hosts import Host

_KEEPALIVE = 15
_TCP_USER_TIMEOUT_MS = 20_000


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
    strictness = "accept-new" if _POOL.accept_new else "yes"
    return ssh_config.ssh_arguments(
        ssh_config.route_to(host), (str(known_hosts.own_file()),), strictness
    )


def ssh_destination(host: Host) -> str:
    """Return the name that OpenSSH is given; an IPv6 address stands in brackets, as rsync wants."""
    name = host.address or host.name
    return f"[{name}]" if ":" in name else name


_Key = tuple[object, ...]


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


def _key(host: Host) -> _Key:
    """Return the key of a host's connection: equal keys share one, whatever else differs."""
    ssh = (host.name, host.address, host.ssh_port, host.user, host.ssh_key, host.ssh_args)
    return (*ssh, host.trainer_command)


def _open_link(host: Host) -> AgentLink:
    route = ssh_config.route_to(host)
    hop = _log_in(f"host {host.name}", route)
    try:
        return AgentLink(host.name, SshPipe(hop, agent_command(host)))
    except NoAgentError as error:
        raise explain(host, route.user, error) from None
    except LauncherError:
        hop.close()
        raise


def _log_in(where: str, route: SshRoute) -> Hop:
    """Return a login on a host whose key is the known one.

    Raises:
        UnreachableError: it failed; each cause has its own message.
    """
    import fabric  # pyright: ignore[reportMissingTypeStubs]

    from launcher.hosts.ssh_login import Login, Preferring, Trust, ssh_errors

    # Their errors also come as exceptions; without a handler logging prints tracebacks.
    for logger in ("paramiko", "fabric", "invoke"):
        logging.getLogger(logger).addHandler(logging.NullHandler())
    name = known_hosts.entry_name(route.hostname, route.port, route.host_key_alias)
    files = (*route.known_hosts, str(known_hosts.own_file()))
    known = known_hosts.find(name, files)
    stream, carriers = _stream(where, route)
    connection: Any = fabric.Connection(
        route.hostname,
        user=route.user,
        port=route.port,
        config=fabric.Config(lazy=True, overrides={"load_ssh_configs": False}),  # ssh -G did
        connect_timeout=CONNECT_TIMEOUT,  # pyright: ignore[reportArgumentType]
        connect_kwargs={
            "sock": stream,
            "banner_timeout": CONNECT_TIMEOUT,
            "auth_timeout": CONNECT_TIMEOUT,
            "channel_timeout": CONNECT_TIMEOUT,
            "auth_strategy": Login(where, route),
            "transport_factory": Preferring({entry.kind for entry in known}),
        },
    )
    # Fabric trusts every key by itself.
    connection.client.set_missing_host_key_policy(Trust(where, name, known, _POOL.accept_new))
    try:
        with ssh_errors(where):
            connection.open()
            connection.transport.set_keepalive(_KEEPALIVE)
    except BaseException:
        connection.client.close()
        stream.close()
        for carrier in carriers:
            carrier.close()
        raise
    return Hop(where, connection.client, carriers, ssh_errors)


def _stream(where: str, route: SshRoute) -> tuple[Any, list[Any]]:
    """Return a byte stream to sshd, and the object to close after it."""
    target = f"{route.hostname} port {route.port}"
    if route.jump is not None:
        gate = _log_in(f"{where}: jump host {route.jump.alias}", route.jump)
        try:
            asked = f"{where}: {target}, through jump host {route.jump.alias}"
            return gate.open_stream(route.hostname, route.port, asked), [gate]
        except LauncherError:
            gate.close()
            raise
    if route.proxy_command is not None:
        proxy = ProxyProcess(ssh_config.expand(route.proxy_command, route))
        return proxy.socket, [proxy]
    try:
        stream = socket.create_connection((route.hostname, route.port), CONNECT_TIMEOUT)
    except socket.gaierror as error:
        raise UnreachableError(
            f"{where}: the name {route.hostname} does not resolve ({error.strerror}); "
            "set ansible_host"
        ) from None
    except TimeoutError:
        raise UnreachableError(
            f"{where}: {target} does not answer within {CONNECT_TIMEOUT:.0f} s; "
            "is it up, and no firewall in between?"
        ) from None
    except ConnectionRefusedError:
        raise UnreachableError(f"{where}: {target} is closed; is sshd running there?") from None
    except OSError as error:
        raise UnreachableError(f"{where}: {target}: {error.strerror or error}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
    return stream, []
