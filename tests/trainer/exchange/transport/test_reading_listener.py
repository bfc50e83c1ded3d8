"""What a coordinator reads is reported to workers of its run, before it serves at its address."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.runs.certificates.authority import Authority
from tests.cluster.real_cluster import write_leaf
from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.waiting import wait_for
from trainer.exchange.protocol.messages import Heartbeat, JoinRefused, Leave, Message, parse_message
from trainer.exchange.protocol.wire import Frame, FrameDecoder, FrameEncoder, MessageType, run_tag
from trainer.exchange.transport import client, reading_listener, tls
from trainer.exchange.transport.client import WorkerClient
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.listener import (
    MAX_PENDING_PER_ADDRESS,
    BoundAddress,
    bind_address,
)
from trainer.exchange.transport.reading_listener import ReadingListener
from trainer.exchange.transport.reading_reporter import ReadingReporter
from trainer.system.errors import InputError
from trainer.system.storage.progress import latest_progress, report_progress

JOIN = join_request(0).to_frame(0)
Reads = Callable[..., BoundAddress]


@pytest.fixture
def reads() -> Iterator[Reads]:
    """Return what starts a coordinator that reads until the test's end."""
    stack = ExitStack()

    def start(folder: Path | None = None) -> BoundAddress:
        bound = bind_address(("127.0.0.1", 0), folder)
        stack.callback(bound.close)
        stack.enter_context(ReadingListener(bound, "run"))
        return bound

    with stack:
        yield start


@pytest.fixture(scope="module")
def leafs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("tls"), Authority.create()
    write_leaf(authority, folder / "coordinator", "coordinator")
    write_leaf(authority, folder / "worker", "rank:0")
    write_leaf(authority, folder / "other-run", "rank:0", run_id="other")
    write_leaf(authority, folder / "not-yet", "rank:0", valid_in=3600)
    write_leaf(Authority.create(), folder / "other-authority", "rank:0")
    authority_file = (folder / "coordinator" / "ca.pem").read_bytes()
    (folder / "other-authority" / "ca.pem").write_bytes(authority_file)
    return folder


class Peer:
    """A connection to a coordinator that reads."""

    def __init__(self, bound: BoundAddress, folder: Path | None = None, run: str = "run") -> None:
        wait_for(lambda: self._connect(bound.port), "the coordinator listens")
        if folder:
            self._end = tls.make_context(folder, server=False).wrap_socket(self._end)
        self._encoder = FrameEncoder(run_tag(run))
        self._decoder = FrameDecoder(run_tag("run"), checksums=folder is None)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def send(self, frame: Frame) -> None:
        self._end.sendall(b"".join(self._encoder.encode(frame)))

    def receive(self) -> Message | None:
        """Return the next message, None at the end of the connection."""
        try:
            while count := self._end.recv_into(self._decoder.free_space()):
                if frame := self._decoder.advance(count):
                    return parse_message(frame)
        except (ConnectionError, ssl.SSLError):
            pass
        return None

    def _connect(self, port: int) -> bool:
        try:
            self._end = socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            return False
        return True


@pytest.mark.parametrize("certified", [False, True], ids=["plaintext", "tls"])
def test_a_worker_that_asks_to_join_hears_the_count_grow(
    reads: Reads, leafs: Path, certified: bool
) -> None:
    bound = reads(leafs / "coordinator" if certified else None)
    with report_progress("reading rows", 7) as progress:
        before, _ = latest_progress()
        with Peer(bound, leafs / "worker" if certified else None) as peer:
            peer.send(JOIN)
            first = peer.receive()
            assert isinstance(first, Heartbeat)
            assert first.read_progress
            assert (first.read_progress.count, first.read_progress.rank) == (before, None)
            progress.advance(3)
            while (later := peer.receive()) == first:
                pass
            assert isinstance(later, Heartbeat)
            assert later.read_progress
            assert later.read_progress.count == before + 3
            assert later.read_progress.description == "reading rows: 3 of 7 rows"


def test_a_worker_that_reads_as_well_keeps_its_connection(
    reads: Reads,
    leafs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    bound = reads(leafs / "coordinator")
    answers: list[Frame] = []
    receive = ReadingReporter._on_frame

    def on_frame(reporter: ReadingReporter, link: Link, frame: Frame) -> None:
        answers.append(frame)
        receive(reporter, link, frame)

    monkeypatch.setattr(ReadingReporter, "_on_frame", on_frame)
    with ReadingReporter(("127.0.0.1", bound.port), "run", 0, leafs / "worker"):
        wait_for(lambda: len(answers) > 2, "reports of the coordinator")
    assert {frame.type for frame in answers} == {MessageType.HEARTBEAT}
    assert "refused" not in caplog.text


def test_a_worker_that_waits_logs_again_what_the_coordinator_reads(
    reads: Reads, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOG_INTERVAL", 0.1)
    caplog.set_level(logging.INFO)
    bound, layout = reads(), ExactProblem().layout
    with report_progress("hashing model.safetensors", 7):
        worker = WorkerClient(
            *(("127.0.0.1", bound.port), join_request(0, run_id="run"), layout),
            codec="fp32",
            folder=None,
            patience=20.0,
        )
        wait_for(lambda: "hashing model.safetensors" in caplog.text, "the first line")
    with report_progress("reading rows", 7) as progress:
        progress.advance(3)
        host = socket.gethostname()
        line = f"waiting for the coordinator on {host}: reading rows: 3 of 7 rows"
        wait_for(lambda: line in caplog.text, "what it reads now")
    worker.close("the worker ends")


def test_a_silent_peer_gets_nothing_and_is_disconnected(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_listener, "JOIN_REQUEST_TIMEOUT", 0.2)
    with Peer(reads()) as peer:
        assert peer.receive() is None


def test_a_peer_that_sends_what_is_not_due_gets_nothing(reads: Reads) -> None:
    with Peer(reads()) as peer:
        peer.send(Leave(reason="").to_frame(0))
        assert peer.receive() is None


def test_a_peer_of_another_run_is_refused_for_good(reads: Reads) -> None:
    with Peer(reads(), run="other") as peer:
        peer.send(JOIN)
        refused = peer.receive()
        assert isinstance(refused, JoinRefused)
        assert "of another run" in refused.reason
        assert not refused.retry


@pytest.mark.parametrize("leaf", ["other-run", "other-authority"])
def test_a_certificate_that_is_not_of_the_run_gets_nothing(
    reads: Reads, leafs: Path, leaf: str
) -> None:
    with Peer(reads(leafs / "coordinator"), leafs / leaf) as peer:
        assert peer.receive() is None


def test_a_certificate_that_is_not_valid_yet_may_come_again(reads: Reads, leafs: Path) -> None:
    with Peer(reads(leafs / "coordinator"), leafs / "not-yet") as peer:
        refused = peer.receive()
        assert isinstance(refused, JoinRefused)
        assert refused.retry


def test_more_certified_workers_wait_than_unauthenticated_ones_may(
    reads: Reads, leafs: Path
) -> None:
    bound = reads(leafs / "coordinator")
    with ExitStack() as stack:
        for _ in range(MAX_PENDING_PER_ADDRESS + 1):
            peer = stack.enter_context(Peer(bound, leafs / "worker"))
            peer.send(JOIN)
            assert isinstance(peer.receive(), Heartbeat)


def test_the_address_is_kept_from_the_reading_to_the_server() -> None:
    bound = bind_address(("127.0.0.1", 0), None)
    with ReadingListener(bound, "run"), Peer(bound) as peer:
        peer.send(JOIN)
        assert isinstance(peer.receive(), Heartbeat)
        with pytest.raises(InputError, match=f"--bind 127.0.0.1:{bound.port}: Address already in"):
            bind_address(("127.0.0.1", bound.port), None)
    with pytest.raises(OSError) as refused:  # nobody waits in a queue of the reader's
        socket.create_connection(("127.0.0.1", bound.port))
    assert refused.value.errno == errno.ECONNREFUSED
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", bound.port))
    for each in bound.sockets:
        each.listen()
    bound.close()
