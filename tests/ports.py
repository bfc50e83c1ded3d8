"""Ports of this machine."""

import random
import socket
from pathlib import Path

_FIRST = 10_000


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on, and that no other process of the tests is given.

    Until it is used, nothing takes it by accident: for connections, and servers on port 0, the
    system chooses from a range above.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = range(_FIRST, first_ephemeral_port())
    for port in random.Random().sample(ports, len(ports)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # A name without a file: it is this process's own, and gone when that ends.
            claim.bind(f"\0motley-test-port-{port}")
            socket.create_server((address, port), family=family).close()
        except OSError:
            claim.close()
            continue
        claim.detach()
        return port
    raise AssertionError(f"no port of {ports} is free")


def first_ephemeral_port() -> int:
    """Return the first of the ports that the system chooses from."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
