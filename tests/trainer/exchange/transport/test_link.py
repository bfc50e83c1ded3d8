"""What a link sends last arrives, also when the peer is busy sending."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.certificates.authority import Authority, certificate_identity
from tests.trainer.exchange.links import end_all, make_link, until
from trainer.exchange.protocol.messages import Shutdown
from trainer.exchange.protocol.wire import (
    HEADER_SIZE,
    Frame,
    FrameDecoder,
    FrameEncoder,
    MessageType,
)
from trainer.exchange.transport import tls
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.send_queue import SendQueue
from trainer.exchange.transport.shared_memory import Averages, WorkerEnd, is_supported
from trainer.exchange.transport.sockets import shake_hands


def test_the_last_message_reaches_a_peer_that_goes_on_sending() -> None:
    """A socket that is closed with bytes unread resets its peer, whose next write then fails."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        links: list[Link] = []

        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()) as peer,
        ):
            connection, _ = listening.accept()
            connection.setblocking(False)
            made = make_link(links.append, closed=lambda link, _: links.remove(link))
            made.serve_connection(connection)
            peer.sendall(b"MOTL")  # of a frame that the link has not read yet
            links[0].send([Shutdown(reason="over", exit_code=6).to_frame(1)])
            links[0].close("over", notified=True)
            await asyncio.sleep(0)
            for _ in range(3):
                await loop.run_in_executor(None, peer.sendall, bytes(100_000))
                await asyncio.sleep(0.05)
            decoder, frame = FrameDecoder(0), None
            while frame is None:
                count = await loop.run_in_executor(None, peer.recv_into, decoder.free_space())
                frame = decoder.advance(count)
            assert frame.type.name == "SHUTDOWN"
        await until(lambda: not links)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_reset_is_told_without_a_systems_number() -> None:
    async def run() -> None:
        reasons: list[str] = []
        near, far = tcp_pair()
        near.setblocking(False)
        with far:
            make_link(
                lambda _: None, closed=lambda _, reason: reasons.append(reason)
            ).serve_connection(near)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: len(reasons) == 1)
        assert reasons == ["the connection broke: Connection reset by peer"]

    asyncio.run(asyncio.wait_for(run(), 60))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a coordinator and a worker of one run do TLS with."""
    authority = Authority.create()
    made: list[ssl.SSLContext] = []
    for role, rank in (("coordinator", None), ("rank-0", 0)):
        folder = tmp_path / role
        folder.mkdir()
        leaf = authority.issue(certificate_identity("run", rank), ["127.0.0.1"])
        for name, content in leaf.contents_by_name().items():
            (folder / name).write_bytes(content)
        made.append(tls.make_context(folder, server=rank is None))
    return made[0], made[1]


async def tls_pair(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], near: socket.socket, far: socket.socket
) -> tuple[socket.socket, socket.socket]:
    """Return the coordinator's and the worker's end of a connection, with TLS complete."""
    near.setblocking(False)
    far.setblocking(False)
    return await asyncio.gather(
        shake_hands(near, contexts[0], server=True), shake_hands(far, contexts[1], server=False)
    )


def test_an_error_of_another_connection_ends_no_link(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """OpenSSL keeps errors in a queue of the thread, and Python leaves some there."""
    frames = [Frame(MessageType.GRADIENT, bytes(200_000), block=block) for block in range(9)]
    received: list[Frame] = []
    closed: list[str] = []

    def leave_an_error() -> None:
        with pytest.raises(ValueError, match="unknown object"):
            ssl.Purpose.fromname("of no certificate")

    def make() -> Link:
        return make_link(
            frame=lambda _, frame: received.append(frame),
            closed=lambda _, reason: closed.append(reason),
        )

    async def run() -> None:
        ends = await tls_pair(contexts, *tcp_pair())
        sender, receiver = make(), make()
        for link, connection in zip((sender, receiver), ends, strict=True):
            link.serve_connection(connection)
        receiver.accept_tensors()
        for link in (sender, receiver):
            leave_an_error()
            link.poll()
        leave_an_error()
        sender.send(frames)  # more than the socket takes
        await until(lambda: bool(closed) or len(received) == len(frames))
        assert not closed
        receiver.abort("over")
        await until(lambda: len(closed) == 2)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [frame.block for frame in received] == [*range(9)]


def test_the_last_bytes_of_a_large_payload_wake_the_loop(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """A link asks to be woken for 64 KiB at once, and OpenSSL may hold 16 KiB of them already."""
    frames = [Frame(MessageType.GRADIENT, bytes(147_000), block=block) for block in range(3)]
    received: list[Frame] = []

    def make(opened: Callable[[Link], Any]) -> Link:
        return make_link(opened, frame=lambda _, frame: received.append(frame))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ends: list[Link] = []
        (ours, relay_in), (near, far) = tcp_pair(), tcp_pair()
        for end in (near, relay_in):
            end.setblocking(False)

        async def trickle(source: socket.socket, target: socket.socket, size: int) -> None:
            while data := await loop.sock_recv(source, size):
                await loop.sock_sendall(target, data)
                await asyncio.sleep(0.002)

        # The sender's bytes pass in odd pieces; what comes back passes as it is.
        relays = [
            asyncio.create_task(trickle(relay_in, near, 5_003)),
            asyncio.create_task(trickle(near, relay_in, 65_536)),
        ]
        receiver, sender = await tls_pair(contexts, far, ours)
        make(lambda link: ends.append(link) or link.accept_tensors()).serve_connection(receiver)
        make(lambda link: ends.append(link) or link.send(frames)).serve_connection(sender)
        await until(lambda: len(received) == len(frames))
        for link in ends:
            link.abort("over")
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        near.close()
        relay_in.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [frame.block for frame in received] == [0, 1, 2]


@pytest.mark.skipif(not is_supported(), reason="no sealed anonymous files here")
def test_a_gradient_in_shared_memory_does_not_hold_the_other_links_up() -> None:
    """All of it is there at once, in frames of a header each: turns are by what they stand for."""
    sizes = (64 * 1024,) * 16
    frames = [
        Frame(MessageType.GRADIENT, bytes(size), block=block) for block, size in enumerate(sizes)
    ]
    received: list[tuple[Link, int]] = []
    links: list[Link] = []
    writers: list[socket.socket] = []

    async def run() -> None:
        averages = Averages(sizes)
        for _ in range(2):
            near, far = socket.socketpair()
            writers.append(far)
            near.setblocking(False)
            shared, descriptors = averages.open_connection()
            queue = SendQueue(0, encrypted=False, shared=WorkerEnd(sizes, *descriptors))
            os.close(descriptors[1])
            queue.append(frames)
            while queue.has_bytes():
                queue.send_to(far)
            link = make_link(
                links.append,
                frame=lambda link, frame: received.append((link, frame.block)),
                closed=lambda link, _: links.remove(link),
            )
            link.serve_connection(near, shared)
            link.accept_tensors()
        first, second = links
        await until(lambda: len(received) == 2 * len(frames))
        for link in (first, second):
            assert [block for of, block in received if of is link] == list(range(16))
        assert received.index((second, 0)) < received.index((first, 8))
        assert received.index((first, 8)) < received.index((second, 15))
        await end_all(links)
        os.close(averages.descriptor)
        for writer in writers:
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_link_with_ever_more_bytes_has_one_turn_at_a_time() -> None:
    """A turn that the link asks of the loop and one that an event brings are the same one."""
    near, far = socket.socketpair()
    far.setblocking(False)
    encoder = FrameEncoder(0)
    left = memoryview(b"")
    rounds, turns = count(), Counter[int]()

    def fill() -> None:
        """Send until the socket takes no more, so that no turn ends for want of bytes."""
        nonlocal left
        with suppress(BlockingIOError):
            while True:
                frame = Frame(MessageType.STATE, bytes(65_536))
                left = left or memoryview(b"".join(encoder.encode(frame)))
                left = left[far.send(left) :]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        present = next(rounds)

        def another_round() -> None:
            nonlocal present
            present = next(rounds)
            loop.call_soon(another_round)

        def heard(_link: Link) -> None:
            turns[present] += 1
            fill()

        ended = loop.create_future()
        link = make_link(
            frame=lambda _link, _frame: fill(),
            heard=heard,
            closed=lambda _link, reason: ended.set_result(reason),
        )
        near.setblocking(False)
        link.serve_connection(near)
        link.accept_tensors()
        fill()
        another_round()
        while turns.total() < 60:
            await asyncio.sleep(0)
        link.abort("over")
        assert await ended == "over"

    with far:
        asyncio.run(asyncio.wait_for(run(), 60))
    assert max(turns.values()) == 1


def test_averages_wait_for_their_commit_but_not_for_long() -> None:
    """In shared memory: without a commit the worker has them soon, and knows who lives."""

    class Averages:
        patient = True

        def place_payload(self, frame: Frame) -> bool:
            return frame.type is MessageType.AVERAGED_GRADIENT

    queue = SendQueue(0, encrypted=False, shared=Averages())  # pyright: ignore[reportArgumentType]
    average = Frame(MessageType.AVERAGED_GRADIENT, bytes(8))
    near, far = socket.socketpair()
    with near, far:
        queue.append([average, average])
        assert queue.has_bytes()
        assert queue.can_wait()
        queue.append([Frame(MessageType.STEP_COMMIT, b"{}")])
        assert queue.has_bytes()
        assert not queue.can_wait()
        assert queue.send_to(near) == 3 * HEADER_SIZE + 2
        assert not queue.has_bytes()
        queue.append([average])
        assert queue.has_bytes()
        assert queue.can_wait()
        queue.stop_waiting()
        assert not queue.can_wait()
        assert queue.send_to(near) == HEADER_SIZE
        queue.append([average] * 40)
        assert queue.has_bytes()
        assert not queue.can_wait()  # a dozen is enough for one system call


def test_a_link_that_is_aborted_among_many_bytes_leaves_the_loop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that was put off until others had their turn came for ever once it had ended."""
    monkeypatch.setattr("trainer.exchange.transport.link._TURN", 1000)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        closed: list[str] = []
        near, far = tcp_pair()
        with far:
            near.setblocking(False)
            link = make_link(
                frame=lambda link, _: link.abort("enough"),
                closed=lambda _, reason: closed.append(reason),
            )
            queue = SendQueue(0, encrypted=False, shared=None)
            queue.append([Shutdown(reason="over", exit_code=6).to_frame(1)])
            while queue.has_bytes():
                queue.send_to(far)
            far.sendall(bytes(10_000))
            link.serve_connection(near)
            await until(lambda: bool(closed))
            assert closed == ["enough"]
            scheduled: list[Callable[..., object]] = []
            call_soon = loop.call_soon

            def count(callback: Callable[..., object], *rest: Any, **how: Any) -> asyncio.Handle:
                scheduled.append(callback)
                return call_soon(callback, *rest, **how)

            monkeypatch.setattr(loop, "call_soon", count)
            await asyncio.sleep(0.01)
            assert not [f for f in scheduled if getattr(f, "__self__", None) is link]

    asyncio.run(asyncio.wait_for(run(), 60))
