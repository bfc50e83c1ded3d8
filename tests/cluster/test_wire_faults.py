"""Bytes that go wrong between real processes: whatever comes in, the run goes on, and right."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.cluster.proxy import Fault, FaultProxy
from tests.cluster.real_cluster import Cluster
from tests.cluster.test_trust import Trickle
from tests.waiting import PATIENCE
from trainer.config import run
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.wire import HEADER_SIZE, Frame, FrameEncoder, MessageType, run_tag
from trainer.replica.backend import ReplicaChoice
from trainer.run.composition import run as build
from trainer.run.inputs import read_inputs

pytestmark = pytest.mark.cluster


class Attacker:
    """Speaks the protocol up to a point, then says what it likes."""

    def __init__(self, cluster: Cluster, rank: int = 9) -> None:
        self.rank = rank
        self._encoder = FrameEncoder(run_tag(cluster.run_id))
        self._socket = socket.create_connection(("127.0.0.1", cluster.port), timeout=PATIENCE)
        inputs = read_inputs(run.load_config(cluster.run_file), cluster.run_id)
        self.request = build.make_request(inputs, _NO_REPLICA, rank)

    def frame(self, frame: Frame) -> bytes:
        """Return the next frame as bytes."""
        return b"".join(self._encoder.encode(frame))

    def hello(self) -> bytes:
        """Return the request to join as bytes."""
        return self.frame(self.request.to_frame(0))

    def join(self) -> int:
        """Join and return the generation."""
        self._socket.sendall(self.hello())
        header = self._socket.recv(HEADER_SIZE, socket.MSG_WAITALL)
        assert header[5] == MessageType.JOIN_ACCEPTED, header
        return struct.unpack_from("<I", header, 12)[0]

    def send(self, data: bytes, *, finish: bool = False) -> None:
        """Send bytes; `finish` ends the stream after them."""
        with suppress(OSError):  # the other side may hang up in the middle of it
            self._socket.sendall(data)
            if finish:
                self._socket.shutdown(socket.SHUT_WR)

    def is_thrown_out(self) -> bool:
        """Wait for the end of the connection."""
        with suppress(ConnectionError):
            while self._socket.recv(65536):
                pass
        self._socket.close()
        return True


class _Nothing:
    device = "cpu"


_NO_REPLICA = ReplicaChoice(_Nothing(), "cpu", "")  # pyright: ignore[reportArgumentType]


def with_length(frame: bytes, length: int) -> bytes:
    """Claim another payload length in a frame's header."""
    at = HEADER_SIZE - 8
    return frame[:at] + struct.pack("<I", length) + frame[at + 4 :]


def flipped(frame: bytes, at: int) -> bytes:
    """Change one byte of a frame."""
    return frame[:at] + bytes([frame[at] ^ 0xFF]) + frame[at + 1 :]


BEFORE_JOINING: dict[str, Callable[[Attacker], bytes]] = {
    "garbage": lambda a: bytes(range(256)) * 40,
    "HTTP": lambda a: b"GET / HTTP/1.1\r\nHost: motley\r\n\r\n" + bytes(HEADER_SIZE),
    "4 GiB": lambda a: with_length(a.hello(), 2**32 - 1),
    "a byte more than allowed": lambda a: with_length(a.hello(), 65537),
    "bad checksum": lambda a: flipped(a.hello(), HEADER_SIZE + 3),
    "a gradient": lambda a: a.frame(Frame(MessageType.GRADIENT, bytes(64))),
    "a state": lambda a: with_length(a.frame(Frame(MessageType.STATE, b"")), 2**20),
    "no JSON": lambda a: a.frame(Frame(MessageType.JOIN_REQUEST, b"\x80\x04}q\0.")),
    "another message": lambda a: a.frame(messages.Heartbeat().to_frame(0)),
}

AFTER_JOINING: dict[str, tuple[Callable[[Attacker, int], bytes], str]] = {
    "a replayed frame": (
        lambda a, g: 2 * a.frame(messages.Heartbeat().to_frame(g, rank=a.rank)),
        "received frame 1, expected 2",
    ),
    "reordered frames": (
        lambda a, g: b"".join(
            reversed([a.frame(messages.Heartbeat().to_frame(g, rank=a.rank)) for _ in range(2)])
        ),
        "received frame 2, expected 1",
    ),
    "a second request": (lambda a, g: a.frame(a.request.to_frame(g)), "not for the coordinator"),
    "an older generation": (
        lambda a, g: a.frame(messages.Heartbeat().to_frame(g - 1)),
        "of generation",
    ),
    "a gradient nobody asked for": (
        lambda a, g: a.frame(
            Frame(MessageType.GRADIENT, bytes(64), generation=g, rank=a.rank, shard=10**6)
        ),
        "is not assigned to rank 9",
    ),
    "too large": (
        lambda a, g: with_length(a.frame(Frame(MessageType.GRADIENT)), 2**20 + 1),
        "at most 1048576",
    ),
    "a false proof": (
        lambda a, g: a.frame(messages.StateLoaded(step=0, digest="0" * 64).to_frame(g)),
        "not the one it was sent",
    ),
    "another's checksum": (
        lambda a, g: flipped(a.frame(messages.Heartbeat().to_frame(g)), HEADER_SIZE - 1),
        "checksum",
    ),
}


def test_hostile_bytes_do_not_disturb_a_run(cluster: Cluster) -> None:
    """Each of them is thrown out, with the reason in the log; two workers go on beside it."""
    cluster.configure(training__epochs=1000)  # it lasts until the last attack
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, "--seconds", "0.005") for rank in (0, 1)]
    trickle = Trickle(cluster.port)
    cluster.wait_step(1)
    for name, attack in BEFORE_JOINING.items():
        attacker = Attacker(cluster)
        attacker.send(attack(attacker))
        assert attacker.is_thrown_out(), name
    cut = Attacker(cluster)
    cut.send(cut.hello()[:-1], finish=True)
    assert cut.is_thrown_out()
    for attack, reason in AFTER_JOINING.values():
        attacker = Attacker(cluster)
        attacker.send(attack(attacker, attacker.join()))
        assert attacker.is_thrown_out()
        assert any(reason in event["reason"] for event in cluster.events("lost")), reason
    assert trickle.closed(PATIENCE)
    assert 4 < trickle.lasted < PATIENCE
    coordinator.signal(signal.SIGTERM)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert {event["rank"] for event in cluster.events("lost")} == {9}
    cluster.check_contracts_so_far([0, 1])


def test_connections_that_break_at_a_byte(cluster: Cluster) -> None:
    """One worker's line loses, changes and cuts bytes at many places; each time it comes back."""
    faults = [
        Fault("truncate", 100),
        Fault("corrupt", 40),
        Fault("corrupt", 100, "down"),
        Fault("truncate", 200_000, "down"),
        Fault("corrupt", 300_000, "down"),
        Fault("cut", 5_000),
        Fault("corrupt", 70_000),
        Fault("truncate", 250_001),
        Fault("corrupt", 1_500_000, "down"),
        Fault("cut", 900_000),
    ]
    cluster.configure(training__epochs=16)
    coordinator = cluster.coordinator(1)
    with FaultProxy(cluster.port, *faults) as proxy:
        workers = [cluster.worker(0, "--seconds", "0.005")]
        workers.append(cluster.worker(1, address=proxy.address))
        codes = [process.wait() for process in (coordinator, *workers)]
        assert set(proxy.happened) == set(faults)
    assert codes == [0, 0, 0]
    assert len(cluster.events("lost", rank=1)) >= 7  # three broke before it was in
    assert not cluster.events("lost", rank=0)
    cluster.check_contracts([0, 1])


def test_a_half_open_and_a_slow_line(cluster: Cluster) -> None:
    """Silence is noticed on both sides; a slow line is no reason to be thrown out."""
    cluster.configure(training__epochs=6, exchange__heartbeat=0.2, exchange__lost_after=3.0)
    coordinator = cluster.coordinator(2)
    with FaultProxy(cluster.port) as proxy:
        proxy.delay, proxy.rate = 0.002, 20e6
        workers = [cluster.worker(0, "--seconds", "0.01")]
        workers.append(cluster.worker(1, address=proxy.address))
        cluster.wait_step(3)
        assert not cluster.events("lost")
        proxy.freeze()
        assert "silent" in cluster.wait_event("lost", rank=1)["reason"]
        at = cluster.step
        cluster.wait_step(at + 2)
        proxy.thaw()
        cluster.wait_event("rejoined", rank=1)
        assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    cluster.check_contracts([0, 1])
