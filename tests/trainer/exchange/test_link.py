"""What a link sends last arrives, also when the peer is busy sending."""

from __future__ import annotations

import asyncio
import socket

from trainer.exchange.protocol.messages import Shutdown
from trainer.exchange.protocol.wire import FrameDecoder
from trainer.exchange.transport.link import Link


def test_the_last_message_reaches_a_peer_that_goes_on_sending() -> None:
    """A socket that is closed with bytes unread resets its peer, whose next write then fails."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        links: list[Link] = []

        def make() -> Link:
            return Link(
                0,
                opened=links.append,
                frame=lambda _link, _frame: None,
                heard=lambda _link: None,
                closed=lambda link, _: links.remove(link),
                max_queued=9,
            )

        server = await loop.create_server(make, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()[:2]) as peer:
            while not links:
                await asyncio.sleep(0.01)
            peer.sendall(b"MOTL")  # of a frame that the link has not read yet
            links[0].send([Shutdown(reason="over", exit_code=6).frame(1)])
            links[0].close("over", told=True)
            await asyncio.sleep(0)
            for _ in range(3):
                await loop.run_in_executor(None, peer.sendall, bytes(100_000))
                await asyncio.sleep(0.05)
            decoder = FrameDecoder(0)
            count = await loop.run_in_executor(None, peer.recv_into, decoder.free_space())
            assert [frame.type.name for frame in decoder.received(count)] == ["SHUTDOWN"]
        while links:
            await asyncio.sleep(0.01)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))
