"""Logging in over SSH: which host key is requested and trusted, which user keys are offered.

`ssh.py` passes these to Fabric's Connection instead of its defaults, which trust every host.
"""

from __future__ import annotations

import base64
import contextlib
import socket
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko  # pyright: ignore[reportMissingTypeStubs]
from paramiko.agent import AgentSSH  # pyright: ignore[reportMissingTypeStubs]

from launcher.errors import LauncherError, UnreachableError
from launcher.hosts import known_hosts
from launcher.hosts.known_hosts import KnownKey
from launcher.hosts.ssh_config import CONNECT_TIMEOUT, SshRoute


@contextlib.contextmanager
def ssh_errors(where: str) -> Generator[None]:
    """Turn what paramiko raises into UnreachableErrors; `where` names the host."""
    try:
        yield
    except LauncherError:
        raise
    except paramiko.ChannelException as error:
        raise UnreachableError(f"{where}: {error.text.lower()}") from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        text = str(error) or "the connection was closed"
        if "banner" in text:
            text = f"no SSH greeting came within {CONNECT_TIMEOUT:.0f} s; is that port sshd's?"
        elif "No existing session" in text:
            text = f"SSH was not ready within {CONNECT_TIMEOUT:.0f} s"
        raise UnreachableError(f"{where}: {text}") from None


class Preferring:
    """Makes transports that request a type of host key that is known, as ssh does."""

    def __init__(self, kinds: set[str]) -> None:
        self._kinds = kinds

    def __call__(self, stream: Any, **settings: Any) -> Any:
        """Return a transport on a stream."""
        transport: Any = paramiko.Transport(stream, **settings)
        options = transport.get_security_options()
        options.key_types = sorted(options.key_types, key=lambda kind: not self._is_known(kind))
        return transport

    def _is_known(self, algorithm: str) -> bool:
        return ("ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm) in self._kinds


class Trust:
    """The policy that paramiko calls for a host key: it has no known keys, so it calls for each."""

    def __init__(self, where: str, name: str, known: Sequence[KnownKey], accept_new: bool) -> None:
        self._where = where
        self._name = name
        self._known = known
        self._accept_new = accept_new

    def missing_host_key(self, _client: Any, _hostname: str, key: Any) -> None:
        """Return if a key may be trusted.

        Raises:
            UnreachableError: it is unknown, changed or revoked.
        """
        kind, data = str(key.get_name()), bytes(key.asbytes())
        known_hosts.verify(self._where, self._name, self._known, kind, data, self._accept_new)


class Login:
    """Logs in by public key only: passwords are never prompted for."""

    def __init__(self, where: str, route: SshRoute) -> None:
        self._where = where
        self._route = route
        self._skipped: list[str] = []

    def authenticate(self, transport: Any) -> None:
        """Log in on a transport.

        Raises:
            UnreachableError: no key was accepted; the message lists those offered and left out.
        """
        with socket.socket(socket.AF_UNIX) as stream:
            self._log_in(transport, self._agent_keys(stream))

    def _log_in(self, transport: Any, agent: Sequence[Any]) -> None:
        offered: list[str] = []
        wants = ""
        for name, key in self._keys(agent):
            offered.append(name)
            try:
                missing = transport.auth_publickey(self._route.user, key)
            except paramiko.BadAuthenticationType as error:
                wants = f"; it wants {' or '.join(error.allowed_types)}"
                break
            except (paramiko.SSHException, OSError, EOFError):
                if not transport.is_active():
                    wants = "; it hung up"
                    break
                continue
            if not missing:
                return
            wants = f"; it wants {' and '.join(missing)} as well"
        keys = f"offered: {', '.join(offered)}" if offered else "no key to offer"
        skipped = f"; left out: {', '.join(self._skipped)}" if self._skipped else ""
        raise UnreachableError(
            f"{self._where}: login as {self._route.user} refused ({keys}{skipped}{wants}); set "
            "ansible_user and ansible_ssh_private_key_file, or: ssh-copy-id"
        )

    def _keys(self, agent: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yield names and keys: the agent's configured ones, those in files, the agent's others."""
        files = dict.fromkeys(self._route.identities)
        public = {_public(path): path for path in files}
        used: set[str] = set()
        for key in agent:
            if path := public.get(bytes(key.asbytes())):
                used.add(path)
                yield f"{path} (agent)", key
        for path in files:
            if path not in used and (key := self._load(path)) is not None:
                yield path, key
        for key in () if self._route.identities_only else agent:
            if bytes(key.asbytes()) not in public:
                yield f"{key.comment or key.get_name()} (agent)", key

    def _agent_keys(self, stream: socket.socket) -> list[Any]:
        """Return the keys of the ssh agent; it is used over `stream` from then on."""
        if self._route.agent is None:
            return []
        client: Any = AgentSSH()
        try:
            stream.settimeout(CONNECT_TIMEOUT)
            stream.connect(self._route.agent)
            client._connect(stream)  # paramiko's Agent supports no other socket than the variable's
        except (OSError, paramiko.SSHException):
            return []
        return list(client.get_keys())

    def _load(self, path: str) -> Any:
        if not Path(path).exists():
            return None
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):
            self._skipped.append(f"{path} (has a passphrase: ssh-add {path})")
        except (paramiko.SSHException, ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or "not a private key that can be used"
            self._skipped.append(f"{path} ({reason})")
        return None


def _public(path: str) -> bytes:
    """Return the public key next to a private one; the path itself when it cannot be read."""
    for name in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(name).read_text(encoding="utf-8").split()
            if text[0].startswith(("ssh-", "ecdsa-", "sk-")):
                return base64.b64decode(text[1], validate=True)
    return path.encode()
