"""The proxy that the tests of this tier and the soak put between workers and a coordinator."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from tests.cluster.proxy import FaultProxy
from tests.waiting import wait_for


def test_connections_that_ended_hold_nothing() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    server = socket.create_server(("127.0.0.1", 0))
    with server, FaultProxy(server.getsockname()[1]) as proxy:
        before, threads = descriptors(), threading.active_count()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                end, _ = server.accept()
                with end:
                    client.sendall(b"there")
                    assert end.recv(16) == b"there"
                    end.sendall(b"back")
                    assert client.recv(16) == b"back"
        wait_for(lambda: threading.active_count() == threads, "the threads end")
        assert descriptors() == before
