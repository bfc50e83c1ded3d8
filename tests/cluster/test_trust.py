"""Mutual TLS on real sockets: who may join, who may coordinate, and who waits outside."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest
from real_cluster import Cluster, Process, write_leaf

from launcher.certificates import Authority

pytestmark = pytest.mark.cluster


class Trickle:
    """A socket that sends one byte a second until the other side has enough of it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=1)
        self._began = time.monotonic()
        self.lasted = 0.0
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def closed(self, seconds: float) -> bool:
        """Wait for the end."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _drip(self) -> None:
        with suppress(OSError):
            # The beginning of a TLS record and of a frame of ours alike: not yet wrong.
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(1000):
                self._socket.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not self._socket.recv(100):
                        break
        self.lasted = time.monotonic() - self._began
        self._socket.close()


def answers_to(port: int, context: ssl.SSLContext | None, data: bytes) -> bytes:
    """Return all that the coordinator tells a stranger who sends `data`."""
    told = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        # In TLS 1.3 this handshake succeeds also without a certificate of ours.
        peer = context.wrap_socket(plain) if context else plain
        with peer:
            peer.sendall(data)
            while piece := peer.recv(65536):
                told += piece
    return told


def test_only_certified_ranks_take_part(cluster: Cluster) -> None:
    tls = cluster.bench.tls
    coordinator = cluster.coordinator(2, "--tls", str(tls / "coordinator"))
    trickle = Trickle(cluster.port)
    first = cluster.worker(0, "--tls", str(tls / "rank-0"))
    cluster.wait_event("joined", rank=0)

    foreign = write_leaf(Authority.create(), cluster.folder / "foreign", "rank:1")
    impatient = cluster.another("impatient")
    impatient.configure(exchange__join_deadline=1.0)
    impatient.run_id = cluster.run_id

    def stranger(rank: int, *flags: str) -> Process:
        return impatient.worker(rank, *flags, address=cluster.address)

    for process, code, words in (
        (stranger(1, "--tls", str(foreign)), 4, "TLS failed"),
        (stranger(1, "--tls", str(tls / "rank-2")), 4, "the certificate is of rank 2"),
        (stranger(1), 3, "no coordinator for 1 s"),
        (stranger(1, "--tls", str(tls / "coordinator")), 3, "no coordinator for 1 s"),
    ):
        assert process.wait() == code, process.text
        assert words in process.text.splitlines()[-1]
        assert "Traceback" not in process.text
    refused = [event["reason"] for event in cluster.events("refused")]
    assert any("claims rank 1" in reason for reason in refused)
    assert any("names no rank" in reason for reason in refused)

    uncertified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    uncertified.check_hostname = False
    uncertified.verify_mode = ssl.CERT_NONE
    assert answers_to(cluster.port, uncertified, b"MTLY") == b""
    assert answers_to(cluster.port, None, b"GET / HTTP/1.0\r\n\r\n")[:1] in (b"", b"\x15")

    assert [event["rank"] for event in cluster.events("joined")] == [0]
    assert trickle.closed(20)
    assert 8 < trickle.lasted < 20
    second = cluster.worker(1, "--tls", str(tls / "rank-1"))
    assert [process.wait() for process in (coordinator, first, second)] == [0, 0, 0]
    cluster.check_contracts([0, 1])


def test_a_worker_cannot_serve_as_coordinator(cluster: Cluster) -> None:
    """A stolen worker certificate must not collect everyone's gradients."""
    tls = cluster.bench.tls
    cluster.coordinator(1, "--tls", str(tls / "rank-2"))
    worker = cluster.worker(0, "--tls", str(tls / "rank-0"))
    assert worker.wait() == 4
    assert "not a coordinator's" in worker.text
    assert not cluster.events("joined")


def test_a_coordinator_of_another_cluster_is_not_trusted(cluster: Cluster) -> None:
    foreign = write_leaf(Authority.create(), cluster.folder / "foreign", "coordinator")
    cluster.coordinator(1, "--tls", str(foreign))
    worker = cluster.worker(0, "--tls", str(cluster.bench.tls / "rank-0"))
    assert worker.wait() == 4
    assert "TLS failed" in worker.text
    assert "Traceback" not in worker.text
