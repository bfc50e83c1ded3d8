"""Mutual TLS on real sockets: who may join, who may coordinate, and who waits outside."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.runs.certificates.authority import CLOCK_SKEW, LEAF_LIFETIME, Authority
from tests.cluster.real_cluster import Cluster, Process, write_leaf
from tests.waiting import PATIENCE

pytestmark = pytest.mark.cluster


@pytest.fixture
def shared_memory() -> bool:
    """Workers use TCP, where certificates say who they are."""
    return False


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
    assert trickle.closed(PATIENCE)
    assert 4 < trickle.lasted < PATIENCE
    second = cluster.worker(1, "--tls", str(tls / "rank-1"))
    assert [process.wait() for process in (coordinator, first, second)] == [0, 0, 0]
    cluster.check_contracts([0, 1])


@pytest.mark.smoke("trust")
def test_a_worker_cannot_serve_as_coordinator(cluster: Cluster) -> None:
    """A stolen worker certificate must not collect everyone's gradients."""
    tls = cluster.bench.tls
    cluster.coordinator(1, "--tls", str(tls / "rank-2"))
    worker = cluster.worker(0, "--tls", str(tls / "rank-0"))
    assert worker.wait() == 4
    assert "not a coordinator's" in worker.text
    assert not cluster.events("joined")


@pytest.mark.smoke("trust")
def test_certificates_of_one_run_are_of_no_use_in_another(cluster: Cluster) -> None:
    """Though the same CA has signed them: whatever is left of a run, its keys end with it."""
    tls, other = cluster.bench.tls, cluster.folder / "other"
    worker_of_other = cluster.bench.leaf(other / "rank-0", "rank:0", "other")
    coordinator_of_other = cluster.bench.leaf(other / "coordinator", "coordinator", "other")
    cluster.coordinator(1, "--tls", str(tls / "coordinator"))
    cluster.wait_event("listening")
    hello = b"MTLY" + bytes(60)
    assert answers_to(cluster.port, client_context(worker_of_other), hello) == b""
    (refused,) = [event["reason"] for event in cluster.events("refused")]
    assert refused.endswith("the peer's certificate names no rank of run run")
    assert not cluster.events("joined")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(coordinator_of_other / "cert.pem", coordinator_of_other / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept_one, args=(listener, context), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        worker = cluster.worker(0, "--tls", str(tls / "rank-0"), address=address)
        assert worker.wait() == 4
    assert "the peer's certificate is not a coordinator's of run run" in worker.text


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def accept_one(listener: socket.socket, context: ssl.SSLContext) -> None:
    with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as peer:
        peer.recv(1)


@pytest.mark.smoke("trust")
def test_a_coordinator_of_another_cluster_is_not_trusted(cluster: Cluster) -> None:
    foreign = write_leaf(Authority.create(), cluster.folder / "foreign", "coordinator")
    cluster.coordinator(1, "--tls", str(foreign))
    worker = cluster.worker(0, "--tls", str(cluster.bench.tls / "rank-0"))
    assert worker.wait() == 4
    assert "TLS failed" in worker.text
    assert "Traceback" not in worker.text


DAY = 86400.0
LONG_AGO = -(LEAF_LIFETIME + 2 * CLOCK_SKEW).total_seconds()


@pytest.mark.parametrize("early", ["worker", "coordinator"])
def test_a_certificate_that_is_not_valid_yet_is_tried_until_the_deadline(
    cluster: Cluster, early: str
) -> None:
    """Right after boot a clock may be a day behind: nothing but its correction helps."""
    impatient = cluster.another("impatient")
    impatient.configure(exchange__join_deadline=8.0)
    impatient.run_id = cluster.run_id
    tls = {
        "coordinator": cluster.bench.tls / "coordinator",
        "worker": cluster.bench.tls / "rank-0",
    }
    identity = "rank:0" if early == "worker" else "coordinator"
    tls[early] = cluster.bench.leaf(cluster.folder / "early", identity, valid_in=DAY)
    cluster.coordinator(1, "--tls", str(tls["coordinator"]))
    worker = impatient.worker(0, "--tls", str(tls["worker"]), address=cluster.address)
    assert worker.wait() == 3
    # Its thread may log that the last attempt failed after the worker has said why it ends.
    (line,) = [line for line in worker.text.splitlines() if "not admitted for 8 s" in line]
    clock = "the coordinator's clock" if early == "worker" else "the local clock"
    assert f"the {early}'s certificate is valid from " in line
    assert f"Z on, {clock} says " in line
    if early == "worker":
        reasons = [event["reason"] for event in cluster.events("refused", rank=0)]
        assert len(reasons) > 1, "it tries again"
        assert all("is valid from" in reason for reason in reasons)


@pytest.mark.parametrize("early", ["worker", "coordinator"])
def test_a_worker_gets_in_once_the_clocks_agree(cluster: Cluster, early: str) -> None:
    tls = {
        "coordinator": cluster.bench.tls / "coordinator",
        "worker": cluster.bench.tls / "rank-0",
    }
    identity = "rank:0" if early == "worker" else "coordinator"
    tls[early] = cluster.bench.leaf(cluster.folder / "early", identity, valid_in=8.0)
    coordinator = cluster.coordinator(1, "--tls", str(tls["coordinator"]))
    worker = cluster.worker(0, "--tls", str(tls["worker"]))
    assert [coordinator.wait(), worker.wait()] == [0, 0]
    cluster.check_contracts([0])


@pytest.mark.smoke("trust")
@pytest.mark.parametrize("late", ["worker", "coordinator"])
def test_an_expired_certificate_is_refused_for_good(cluster: Cluster, late: str) -> None:
    tls = {
        "coordinator": cluster.bench.tls / "coordinator",
        "worker": cluster.bench.tls / "rank-0",
    }
    identity = "rank:0" if late == "worker" else "coordinator"
    tls[late] = cluster.bench.leaf(cluster.folder / "late", identity, valid_in=LONG_AGO)
    cluster.coordinator(1, "--tls", str(tls["coordinator"]))
    worker = cluster.worker(0, "--tls", str(tls["worker"]))
    assert worker.wait() == 4
    assert f"the {late}'s certificate was valid until" in worker.text.splitlines()[-1]
    assert not cluster.events("joined")
