"""Logging in over SSH with Fabric: the one file that makes its connections.

What ssh would use (`ssh_config.py`) becomes Fabric's configuration. Fabric by itself trusts every
host key; here each client, jump hosts included, trusts those of `host_keys.py` alone.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import logging
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fabric  # pyright: ignore[reportMissingTypeStubs]
import paramiko  # pyright: ignore[reportMissingTypeStubs]
from cryptography.exceptions import UnsupportedAlgorithm
from fabric.auth import OpenSSHAuthStrategy  # pyright: ignore[reportMissingTypeStubs]
from fabric.runners import Remote  # pyright: ignore[reportMissingTypeStubs]
from invoke.exceptions import CommandTimedOut
from paramiko.agent import AgentSSH  # pyright: ignore[reportMissingTypeStubs]
from paramiko.auth_strategy import (  # pyright: ignore[reportMissingTypeStubs]
    AuthFailure,
    InMemoryPrivateKey,
    OnDiskPrivateKey,
)

from launcher.errors import ConfigError, LauncherError, UnreachableError
from launcher.hosts.host_keys import HostKeys
from launcher.hosts.ssh_config import CONNECT_TIMEOUT, SshRoute, jump_to

MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept."""

_KEEPALIVE = 15
_TCP_USER_TIMEOUT_MS = 20_000
_ALGORITHMS = (
    ("ciphers", "ciphers"),
    ("digests", "macs"),
    ("kex", "kexalgorithms"),
    ("key_types", "hostkeyalgorithms"),
)
"""paramiko's and ssh's names of the algorithms that may be used."""

_REFUSED = ("BindInterface", "KnownHostsCommand")
"""Settings of ssh that decide where a login goes or what is trusted, and that paramiko lacks."""

# Their errors come as exceptions too; without a handler, logging prints tracebacks.
for _name in ("paramiko", "fabric", "invoke"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

_OPEN: set[Login] = set()


@atexit.register
def _close_all() -> None:
    """End every login, also those that a thread still waits for."""
    for login in _OPEN.copy():
        login.close()


class Login:
    """A login on a host whose key is known, through the jump hosts before it. Thread-safe."""

    def __init__(self, where: str, route: SshRoute) -> None:
        """Log in.

        Args:
            where: The host, for people.
            route: How ssh reaches it.

        Raises:
            UnreachableError: the login failed; each cause has its own message.
            ConfigError: a setting of ssh cannot be used here.
        """
        self._where, self._route, self._greeting = where, route, b""
        self._proxy: subprocess.Popen[bytes] | None = None
        for name in _REFUSED:
            if route.one(name.lower()):
                raise ConfigError(
                    f"{where}: ssh's {name} has no counterpart here; the way out: docs/ssh.md"
                )
        keys = HostKeys(where, route)
        jump = jump_to(route, where)
        self._through = Login(f"{where}: jump host {route.jumps[-1]}", jump) if jump else None
        identities = "".join(f"IdentityFile {path}\n" for path in _all(route, "identityfile"))
        self._connection: Any = fabric.Connection(
            route.address,
            user=route.user,
            port=route.port,
            config=fabric.Config(
                lazy=True,  # none of Fabric's own files
                ssh_config=paramiko.SSHConfig.from_text(f"Host *\n{identities}"),
                overrides={
                    "authentication": {"strategy_class": partial(_Keys, where, route)},
                    "runners": {"remote": _BoundedRemote},
                },
            ),
            gateway=self._through._connection if self._through else False,  # None: looked up
            forward_agent=False,
            connect_timeout=CONNECT_TIMEOUT,
            connect_kwargs={
                "banner_timeout": CONNECT_TIMEOUT,
                "auth_timeout": CONNECT_TIMEOUT,
                "channel_timeout": CONNECT_TIMEOUT,
                "transport_factory": partial(_transport, where, route, keys),
            },
        )
        self._connection.client.set_missing_host_key_policy(_Verified(keys))
        _OPEN.add(self)
        try:
            with self._errors():
                if not self._connection.gateway:
                    self._connection.connect_kwargs["sock"] = self._stream()
                self._connection.open()
                self._connection.transport.set_keepalive(_KEEPALIVE)
        except BaseException:
            self.close()
            raise

    @property
    def host_key(self) -> str:
        """The fingerprint of the host's key."""
        return str(self._connection.transport.get_remote_server_key().fingerprint)

    def start(self, command: str) -> Any:
        """Return the channel of a command of the login shell.

        Raises:
            UnreachableError: the login has ended, or the host allows no more channels.
        """
        with self._errors():
            channel = self._connection.create_session()
            channel.settimeout(CONNECT_TIMEOUT)
            channel.exec_command(command)
            return channel

    def run(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        """Run a program; return its exit code and its output.

        Raises:
            OSError: it could not be started, or has not ended in time (TimeoutError).
        """
        try:
            done = self._connection.run(
                shlex.join(argv), hide=True, warn=True, in_stream=False, timeout=deadline
            )
        except CommandTimedOut:
            raise TimeoutError from None
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error) or "the login has ended") from None
        if done.exited < 0:  # paramiko's code of a channel that closed without one
            raise OSError("the login has ended")
        return int(done.exited), (done.stdout + done.stderr)[:MOST_OUTPUT]

    def close(self) -> None:
        """End it and the logins before it. Idempotent."""
        _OPEN.discard(self)
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            self._connection.client.close()  # open or not
        if sock := self._connection.connect_kwargs.get("sock"):
            sock.close()
        if self._proxy is not None:
            self._proxy.kill()  # with the end of its input it may be waiting for the host's
            self._proxy.wait()
        if self._through is not None:
            self._through.close()

    def _stream(self) -> socket.socket:
        """Return the connection to sshd: of TCP, or of a ProxyCommand."""
        if command := _proxy_command(self._route):
            # Not Fabric's gateway of a string: its threads trip over a program that has ended.
            ours, theirs = socket.socketpair()
            with theirs:
                self._proxy = subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {command}"],  # for the shell, by ssh_config(5)
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the launcher alone
                )
            return ours
        address, port = self._route.address, self._route.port
        family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        if only := family.get(self._route.one("addressfamily") or "any"):
            address = str(socket.getaddrinfo(address, port, only)[0][4][0])
        bind = self._route.one("bindaddress")
        stream = socket.create_connection((address, port), CONNECT_TIMEOUT, bind and (bind, 0))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        with contextlib.suppress(OSError):  # paramiko forgets what is no greeting
            self._greeting = stream.recv(255, socket.MSG_PEEK)
        return stream

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        """Turn what the network and paramiko raise into UnreachableErrors."""
        try:
            yield
        except LauncherError:
            raise
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise UnreachableError(f"{self._where}: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        transport = self._connection.client.get_transport()
        target = f"{self._route.address} port {self._route.port}"
        if isinstance(error, socket.gaierror):
            return (
                f"the name {self._route.address} does not resolve ({error.strerror}); "
                "set ansible_host"
            )
        if isinstance(error, paramiko.ChannelException):
            through = f"through jump host {self._route.jumps[-1]}: " if self._through else ""
            return f"{'' if transport else through}{error.text.lower()}"
        if isinstance(error, ConnectionRefusedError):
            return f"{target} is closed; is sshd running there?"
        if isinstance(error, TimeoutError) and transport is None:
            return (
                f"{target} does not answer within {CONNECT_TIMEOUT} s; is it up, and no firewall "
                "in between?"
            )
        if transport is None:
            return f"{target}: {getattr(error, 'strerror', None) or error}"
        if not transport.remote_version:
            said = self._greeting.split(b"\n")[0].decode(errors="replace").strip()
            why = f"it says {said!r}" if said else "nothing came"
            return (
                f"no SSH greeting came within {CONNECT_TIMEOUT} s ({why}); is that port sshd's, "
                "and not overloaded?"
            )
        return str(error) or "the connection was closed"


class _Verified(paramiko.MissingHostKeyPolicy):
    """What paramiko calls for each host key, since its client has loaded none."""

    def __init__(self, keys: HostKeys) -> None:
        self._keys = keys

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        del client, hostname  # an alias and the port make the name that is looked for
        self._keys.verify(str(key.get_name()), bytes(key.asbytes()))


class _Keys(OpenSSHAuthStrategy):
    """Offers the keys that ssh would, in its order; never asks for a password or a passphrase."""

    def __init__(self, where: str, route: SshRoute, **given: Any) -> None:
        # Not Fabric's own: it connects to the agent of the environment alone.
        super(OpenSSHAuthStrategy, self).__init__(ssh_config=given["ssh_config"])
        self.username = given["username"]
        self._where, self._route = where, route
        self._offered: list[str] = []
        self._left_out: list[str] = []

    def authenticate(self, transport: Any) -> Any:
        """Log in on a transport.

        Raises:
            UnreachableError: no key was accepted; the message lists those offered and left out.
        """
        self._transport = transport
        self.agent = _Agent(self._route)  # closed by Fabric
        with contextlib.suppress(AuthFailure):
            untyped: Any = super()
            result = untyped.authenticate(transport)
            if transport.is_authenticated():
                return result
        text = f"offered: {', '.join(self._offered)}" if self._offered else "no key to offer"
        if self._left_out:
            text += f"; left out: {', '.join(self._left_out)}"
        try:
            transport.auth_none(self.username)
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                text += f"; it wants {','.join(error.allowed_types)}"
        except (paramiko.SSHException, OSError, EOFError):
            text += "; too many: set IdentitiesOnly"
        raise UnreachableError(
            f"{self._where}: login as {self.username} refused ({text}); set ansible_user and "
            "ansible_ssh_private_key_file, or: ssh-copy-id"
        )

    def get_sources(self) -> Generator[Any]:
        """Yield keys until the host has hung up."""
        if self._route.one("pubkeyauthentication") in ("no", "false"):
            return
        for name, source in self._named():
            if not self._transport.is_active():
                return
            self._offered.append(name)
            yield source

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield names and keys as ssh orders them: certificates, the agent's keys, files."""
        settings: Any = self.ssh_config
        paths: list[str] = settings.get("identityfile", [])
        files = {path: _public(path) for path in dict.fromkeys(paths)}
        held = {bytes(key.asbytes()): key for key in self.agent.get_keys()}
        keys: list[tuple[str, Any]] = [
            (path, held.get(public) or self._load(path)) for path, public in files.items()
        ]
        for path, key in keys:
            for certificate in [f"{path}-cert.pub", *_all(self._route, "certificatefile")]:
                if key is not None and _certify(key, certificate):
                    yield certificate, InMemoryPrivateKey(self.username, key)
                    key.public_blob = None  # and without it
        for path, key in keys:
            if isinstance(key, paramiko.AgentKey):
                yield f"{path} (agent)", InMemoryPrivateKey(self.username, key)
        for public, key in held.items():
            if public not in files.values() and self._route.one("identitiesonly") != "yes":
                name = f"{key.comment or key.get_name()} (agent)"
                yield name, InMemoryPrivateKey(self.username, key)
        for path, key in keys:
            if key is not None and not isinstance(key, paramiko.AgentKey):
                key.public_blob = None
                yield path, OnDiskPrivateKey(self.username, "ssh-config", Path(path), key)

    def _load(self, path: str) -> Any:
        if not Path(path).exists():
            return None
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):
            self._left_out.append(f"{path} (has a passphrase: ssh-add {path})")
        except (paramiko.SSHException, UnsupportedAlgorithm, ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or "not a key for use without an agent"
            self._left_out.append(f"{path} ({reason})")
        return None


class _Agent(AgentSSH):
    """The ssh agent of a route; paramiko's own knows that of the environment alone."""

    def __init__(self, route: SshRoute) -> None:
        super().__init__()
        path = (route.settings.get("identityagent") or ["SSH_AUTH_SOCK"])[0]
        if path == "SSH_AUTH_SOCK" or path.startswith("$"):
            path = os.environ.get(path.strip("${}"), "none")
        self._stream = socket.socket(socket.AF_UNIX)
        this: Any = self  # its types leave the method out
        if path == "none":
            return
        with contextlib.suppress(OSError, paramiko.SSHException):
            self._stream.settimeout(CONNECT_TIMEOUT)
            self._stream.connect(str(Path(path).expanduser()))
            this._connect(self._stream)

    def close(self) -> None:
        self._stream.close()


class _BoundedRemote(Remote):
    """Fabric's runner for a program that may never stop printing: the rest is read and dropped."""

    kept = 0

    def read_proc_stdout(self, num_bytes: int) -> bytes:
        return self._bounded(super().read_proc_stdout, num_bytes)

    def read_proc_stderr(self, num_bytes: int) -> bytes:
        return self._bounded(super().read_proc_stderr, num_bytes)

    def _bounded(self, read: Callable[[int], bytes], most: int) -> bytes:
        data = read(most)
        self.kept += len(data)
        while data and self.kept > MOST_OUTPUT:
            data = read(most)
        return data


def _transport(where: str, route: SshRoute, keys: HostKeys, stream: Any, **given: Any) -> Any:
    """Return a transport with ssh's algorithms, of which it asks for a known host key first."""
    transport: Any = paramiko.Transport(stream, **given)
    options = transport.get_security_options()
    for ours, name in _ALGORITHMS:
        there = getattr(options, ours)
        wanted = [one for one in _all(route, name)[0].split(",") if one in there]
        if not wanted:
            raise ConfigError(f"{where}: Fabric has none of ssh's {name}: {_all(route, name)[0]}")
        setattr(options, ours, wanted)
    known = {entry.kind for entry in keys.known if not entry.marker}
    options.key_types = sorted(
        options.key_types, key=lambda one: re.sub("^rsa-sha2-.*", "ssh-rsa", one) not in known
    )
    return transport


def _proxy_command(route: SshRoute) -> str | None:
    """Return ssh's ProxyCommand with its tokens filled in.

    Raises:
        ConfigError: a name has characters with a meaning in the shell.
    """
    command = route.one("proxycommand")
    if command is None:
        return None
    tokens = {
        "%": "%",
        "h": route.address,
        "n": route.destination,
        "p": str(route.port),
        "r": route.user,
    }
    for name in (route.address, route.destination, route.user):
        if shlex.quote(name) != name:
            raise ConfigError(f"{name!r} cannot stand in a ProxyCommand")
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), command)


def _all(route: SshRoute, name: str) -> Sequence[str]:
    """Return the values of a setting of ssh; none for `none`."""
    return [value for value in route.settings.get(name, ()) if value != "none"]


def _public(path: str) -> bytes:
    """Return the public key beside a private one, or in its place; empty if there is none."""
    for name in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError, IndexError):
            kind, key = Path(name).read_text(encoding="utf-8").split()[:2]
            if kind.startswith(("ssh-", "ecdsa-", "sk-")):
                return base64.b64decode(key, validate=True)
    return b""


def _certify(key: Any, certificate: str) -> bool:
    """Give a key its certificate; return whether that file is one of it."""
    with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
        key.load_certificate(str(Path(certificate).expanduser()))
        return bytes(key.asbytes())[4 + len(key.get_name()) :] in key.public_blob.key_blob
    return False
