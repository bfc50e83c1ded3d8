"""Ports of this machine."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FIRST = 10_000
_given: set[int] = set()
_locks: int | None = None
"""A file of which this process has locked a byte for each port that it was given."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on, and that no other process of the tests is given.

    Until it is used, nothing takes it by accident: for connections, and servers on port 0, the
    system chooses from a range above.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = range(_FIRST, first_ephemeral_port())
    for port in random.Random().sample(ports, len(ports)):
        if port in _given:
            continue
        try:
            fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            socket.create_server((address, port), family=family).close()
        except OSError:
            continue
        _given.add(port)
        return port
    raise AssertionError(f"no port of {ports} is free")


def first_ephemeral_port() -> int:
    """Return the first of the ports that the system chooses from."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _lock_file() -> int:
    global _locks
    if _locks is None:
        path = f"{tempfile.gettempdir()}/motley-test-ports-{os.getuid()}"
        _locks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return _locks
