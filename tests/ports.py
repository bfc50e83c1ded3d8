"""Ports of this machine."""

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address that nothing listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as probe:
        return probe.getsockname()[1]
