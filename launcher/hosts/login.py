"""Logging in over SSH with Fabric: the one file that makes its connections.

What ssh would use (`ssh_config.py`) becomes Fabric's configuration. Fabric by itself trusts every
host key; here each client, jump hosts included, trusts those of `host_keys.py` alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fabric  # pyright: ignore[reportMissingTypeStubs]
import paramiko  # pyright: ignore[reportMissingTypeStubs]
from cryptography.exceptions import UnsupportedAlgorithm
from fabric.auth import OpenSSHAuthStrategy  # pyright: ignore[reportMissingTypeStubs]
from invoke.exceptions import CommandTimedOut, Failure, WatcherError
from invoke.watchers import StreamWatcher
from paramiko import agent, auth_strategy, pkey  # pyright: ignore[reportMissingTypeStubs]

from launcher.errors import ConfigError, UnreachableError
from launcher.hosts.host_keys import HostKeys
from launcher.hosts.ssh_config import CONNECT_TIMEOUT, SshRoute, resolve_jump

MOST_OUTPUT = 1 << 20
"""Characters that a program may print."""

_KEEPALIVE = 15
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
        """Log in; `where` is the host, for people.

        Raises:
            UnreachableError: the login failed; each cause has its own message.
            ConfigError: a setting of ssh cannot be used here.
        """
        self._where, self._route, self._greeting = where, route, b""
        self._proxy: subprocess.Popen[bytes] | None = None
        for name in _REFUSED:
            if route.first_value(name.lower()):
                raise ConfigError(f"{where}: Motley does not support ssh's {name}; see docs/ssh.md")
        self._keys = HostKeys(where, route)
        jump = resolve_jump(route, where)
        self._through = Login(f"{where}: jump host {route.jumps[-1]}", jump) if jump else None
        identities = "".join(f"IdentityFile {path}\n" for path in route.all_values("identityfile"))
        # Of what `ssh -G` prints the identities alone: paramiko keeps the first of several
        # certificates, and Fabric would follow ProxyJump itself.
        self._connection: Any = fabric.Connection(
            route.address,
            user=route.user,
            port=route.port,
            config=fabric.Config(
                lazy=True,  # none of Fabric's own files
                ssh_config=paramiko.SSHConfig.from_text(f"Host *\n{identities}"),
                overrides={"authentication": {"strategy_class": partial(_Keys, where, route)}},
            ),
            gateway=self._through._connection if self._through else False,  # None: looked up
            forward_agent=False,
            connect_timeout=CONNECT_TIMEOUT,
            connect_kwargs={
                "banner_timeout": CONNECT_TIMEOUT,
                "auth_timeout": CONNECT_TIMEOUT,
                "channel_timeout": CONNECT_TIMEOUT,
                "transport_factory": self._open_transport,
            },
        )
        self._connection.client.set_missing_host_key_policy(self._keys)
        _OPEN.add(self)
        with self._close_on_failure():
            if not self._connection.gateway:
                self._connection.connect_kwargs["sock"] = self._connect_stream()
            self._connection.open()
            self._connection.transport.set_keepalive(_KEEPALIVE)
            self.host_key = str(self._connection.transport.get_remote_server_key().fingerprint)

    def run_program(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        """Run a program as `Pipe.run` (`rpc.py`); one that never stops printing is ended."""
        ends = time.monotonic() + deadline
        try:
            done = self._connection.run(
                shlex.join(argv),
                hide=True,
                warn=True,
                in_stream=False,
                timeout=deadline,
                watchers=[_OutputLimit()],
            )
        except CommandTimedOut:
            raise TimeoutError from None
        except (paramiko.SSHException, EOFError, Failure) as error:
            why = error.reason if isinstance(error, Failure) else error
            raise OSError(str(why) or "the connection was closed") from None
        if done.exited < 0:  # paramiko's code of a channel that closed without one
            if time.monotonic() >= ends:  # Invoke closed it, and its timer's thread is not over yet
                raise TimeoutError
            raise OSError("the connection was closed")
        return int(done.exited), done.stdout + done.stderr

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

    def _connect_stream(self) -> socket.socket:
        """Return the connection to sshd: of TCP, or of a ProxyCommand."""
        if command := self._proxy_command():
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
            return (
                self._receive_socket(ours)
                if self._route.first_value("proxyusefdpass") == "yes"
                else ours
            )
        address, port = self._route.address, self._route.port
        family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        if only := family.get(self._route.first_value("addressfamily") or "any"):
            address = str(socket.getaddrinfo(address, port, only)[0][4][0])
        bind = self._route.first_value("bindaddress")
        stream = socket.create_connection((address, port), CONNECT_TIMEOUT, bind and (bind, 0))
        with contextlib.suppress(OSError):  # paramiko forgets what is no greeting
            self._greeting = stream.recv(255, socket.MSG_PEEK)
        return stream

    def _receive_socket(self, proxy: socket.socket) -> socket.socket:
        """Return the connection that a ProxyCommand hands over: ProxyUseFdpass, ssh_config(5)."""
        with proxy:
            proxy.settimeout(CONNECT_TIMEOUT)
            _, descriptors, _, _ = socket.recv_fds(proxy, 1, 1)
        if not descriptors:
            raise OSError("its ProxyCommand passed no file descriptor (ProxyUseFdpass)")
        return socket.socket(fileno=descriptors[0])

    def _proxy_command(self) -> str | None:
        """Return ssh's ProxyCommand with its tokens filled in.

        Raises:
            ConfigError: a name has characters with a meaning in the shell.
        """
        route = self._route
        names = {"h": route.address, "n": route.destination, "r": route.user}
        command = route.first_value("proxycommand")
        for name in names.values() if command else ():
            if shlex.quote(name) != name:
                raise ConfigError(f"{self._where}: {name!r} is not allowed in a ProxyCommand")
        tokens = {**names, "p": str(route.port), "%": "%"}
        return command and re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), command)

    def _open_transport(self, stream: Any, **given: Any) -> Any:
        """Return a transport with ssh's algorithms, of which it asks for a known host key first."""
        transport: Any = paramiko.Transport(stream, **given)
        options = transport.get_security_options()
        for ours, name in _ALGORITHMS:
            asked = self._route.all_values(name)[0]
            wanted = [one for one in asked.split(",") if one in getattr(options, ours)]
            if not wanted:
                raise ConfigError(f"{self._where}: Fabric does not support ssh's {name}: {asked}")
            setattr(options, ours, wanted)
        known = {entry.kind for entry in self._keys.known}
        options.key_types = sorted(
            options.key_types, key=lambda one: re.sub("^rsa-sha2-.*", "ssh-rsa", one) not in known
        )
        return transport

    @contextlib.contextmanager
    def _close_on_failure(self) -> Generator[None]:
        """Close the login if it fails; errors of the network become UnreachableErrors."""
        try:
            yield
        except BaseException as error:
            is_of_ssh = isinstance(error, (paramiko.SSHException, OSError, EOFError))
            reason = self._failure_reason(error) if is_of_ssh else ""
            self.close()
            if not is_of_ssh:
                raise
            raise UnreachableError(f"{self._where}: {reason}") from None

    def _failure_reason(self, error: BaseException) -> str:
        transport = self._connection.client.get_transport()
        target = f"{self._route.address} port {self._route.port}"
        if isinstance(error, paramiko.ChannelException):
            through = f"through jump host {self._route.jumps[-1]}: " if self._through else ""
            return f"{'' if transport else through}{error.text.lower()}"
        if isinstance(error, socket.gaierror):
            why = f"does not resolve ({error.strerror}); set ansible_host"
            return f"the name {self._route.address} {why}"
        if isinstance(error, ConnectionRefusedError):
            return f"{target} refused the connection; is sshd running there?"
        if isinstance(error, TimeoutError) and transport is None:
            late = f"did not answer within {CONNECT_TIMEOUT} s"
            return f"{target} {late}; is the host up, and does no firewall block the port?"
        if transport is None:
            return f"{target}: {getattr(error, 'strerror', None) or error}"
        greeting = transport.remote_version
        if not greeting:
            banner = self._greeting.split(b"\n")[0].decode(errors="replace").strip()
            received = repr(banner) if banner else "nothing"
            late = f"sent no SSH greeting within {CONNECT_TIMEOUT} s, but {received}"
            return f"{target} {late}; is that port sshd's, and is sshd not overloaded?"
        if isinstance(error, OSError | EOFError):
            why = getattr(error, "strerror", None) or "the stream ended"
            return f"{target} closed the connection after its greeting {greeting!r}: {why}"
        return str(error) or "the connection was closed"


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
        with contextlib.suppress(paramiko.AuthenticationException):
            untyped: Any = super()
            result = untyped.authenticate(transport)
            if transport.is_authenticated():
                return result
        text = f"offered: {', '.join(self._offered)}" if self._offered else "no key to offer"
        if self._left_out:
            text += f"; skipped: {', '.join(self._left_out)}"
        try:
            transport.auth_none(self.username)
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                text += f"; the host accepts {', '.join(error.allowed_types)}"
        except (paramiko.SSHException, OSError, EOFError):
            text += "; too many keys: set IdentitiesOnly"
        raise UnreachableError(
            f"{self._where}: login as {self.username} refused ({text}); set ansible_user and "
            "ansible_ssh_private_key_file, or: ssh-copy-id"
        )

    def get_sources(self) -> Generator[Any]:
        """Yield keys until the host has hung up."""
        if self._route.first_value("pubkeyauthentication") in ("no", "false"):
            return
        for name, key in self._iterate_keys():
            if not self._transport.is_active():
                return
            self._offered.append(name)
            yield auth_strategy.InMemoryPrivateKey(self.username, key)

    def _iterate_keys(self) -> Iterator[tuple[str, Any]]:
        """Yield names and keys as ssh orders them: certificates, the agent's keys, files."""
        settings: Any = self.ssh_config
        held = {bytes(key.asbytes()): key for key in self.agent.get_keys()}
        keys: dict[str, Any] = {}
        for path in settings.get("identityfile", []):
            if key := held.pop(_public_key(path), None) or self._load_key(path):
                keys.setdefault(path, key)
        for path, key in keys.items():
            for certificate in (f"{path}-cert.pub", *self._route.all_values("certificatefile")):
                if _attach_certificate(key, certificate):
                    yield certificate, key
                key.public_blob = None  # from now on without it
        ours = [path for path, key in keys.items() if not isinstance(key, paramiko.AgentKey)]
        for path in keys:
            if path not in ours:
                yield f"{path} (agent)", keys[path]
        if self._route.first_value("identitiesonly") != "yes":
            for key in held.values():
                yield f"{key.comment or key.get_name()} (agent)", key
        for path in ours:
            yield path, keys[path]

    def _load_key(self, path: str) -> Any:
        if not Path(path).exists():
            return None
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):
            self._left_out.append(f"{path} (has a passphrase: ssh-add {path})")
        except (paramiko.SSHException, UnsupportedAlgorithm, ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or "not a key that paramiko can read"
            self._left_out.append(f"{path} ({reason})")
        return None


class _Agent(agent.Agent):
    """The ssh agent of a route; paramiko's own knows that of the environment alone."""

    def __init__(self, route: SshRoute) -> None:
        agent.AgentSSH.__init__(self)
        path = (route.settings.get("identityagent") or ["SSH_AUTH_SOCK"])[0]
        if path == "SSH_AUTH_SOCK" or path.startswith("$"):
            path = os.environ.get(path.strip("${}"), "none")
        if path == "none":
            return
        this: Any = self  # its types leave the method out
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(CONNECT_TIMEOUT)
            stream.connect(str(Path(path).expanduser()))
            this._connect(stream)
        except (OSError, paramiko.SSHException):
            stream.close()


class _OutputLimit(StreamWatcher):
    """Ends a program that prints more than is kept in memory."""

    def submit(self, stream: str) -> Iterator[str]:
        if len(stream) > MOST_OUTPUT:
            raise WatcherError(f"the program printed more than {MOST_OUTPUT:,} characters")
        return iter(())


def _public_key(path: str) -> bytes:
    """Return the public key beside a private one, or in its place; empty if there is none."""
    for name in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return bytes(pkey.PublicBlob.from_file(name).key_blob)
    return b""


def _attach_certificate(key: Any, certificate: str) -> bool:
    """Give a key its certificate; return whether that file is one of it."""
    with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
        key.load_certificate(str(Path(certificate).expanduser()))
        return bytes(key.asbytes())[4 + len(key.get_name()) :] in key.public_blob.key_blob
    return False
