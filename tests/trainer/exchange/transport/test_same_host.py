"""Who may meet whom over shared memory: one user, one host, one run; else TCP serves."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.trainer.exchange.links import end_all, make_link, until
from trainer.exchange.transport import same_host
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.same_host import SameHostListener, make_socket_name
from trainer.exchange.transport.shared_memory import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="no sealed anonymous files here")

RUN, SIZES = 77, (64, 8)
NOBODY = 65534
HERE = "127.0.0.1"


def with_listener(use: Callable[[int, list[Link]], Awaitable[None]]) -> None:
    """Let a coroutine use a listener; it gets the port in its name, and the links that are open."""

    async def run() -> None:
        links: list[Link] = []

        def make() -> Link:
            return make_link(links.append, run=RUN, closed=lambda link, _: links.remove(link))

        with socket.create_server((HERE, 0)) as reserved:  # a port that is nobody else's
            port = reserved.getsockname()[1]
            listener = SameHostListener(make_socket_name(port, RUN), SIZES, make)
            listener.start()
            try:
                await use(port, links)
            finally:
                listener.close()
                await end_all(links)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_worker_finds_its_coordinator_and_maps_what_it_is_handed() -> None:
    async def use(port: int, links: list[Link]) -> None:
        found = await same_host.connect_same_host((HERE, port), RUN, SIZES)
        assert found is not None
        await until(lambda: len(links) == 1)
        assert links[0].peer == "this machine"
        assert links[0].transport == "shared memory"
        found[0].close()
        await until(lambda: not links)

    with_listener(use)


@pytest.mark.parametrize(
    ("host", "run", "sizes"),
    [
        (HERE, RUN + 1, SIZES),
        (HERE, RUN, (64, 9)),
        ("192.0.2.1", RUN, SIZES),  # documentation's: never an address of this machine
        ("no-such-host.invalid", RUN, SIZES),
    ],
)
def test_without_an_agreement_there_is_tcp(host: str, run: int, sizes: tuple[int, ...]) -> None:
    async def use(port: int, _: list[Link]) -> None:
        assert await same_host.connect_same_host((host, port), run, sizes) is None

    with_listener(use)


def test_another_port_is_another_coordinator() -> None:
    async def use(port: int, _: list[Link]) -> None:
        assert await same_host.connect_same_host((HERE, port + 1), RUN, SIZES) is None

    with_listener(use)


def test_two_coordinators_of_one_name_are_refused() -> None:
    async def use(port: int, _: list[Link]) -> None:
        gc.collect()  # what tests before this one left
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(OSError, match="in use"):
            SameHostListener(make_socket_name(port, RUN), SIZES, lambda: pytest.fail("never asked"))
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    with_listener(use)


_INTRUDER = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
name = bytes.fromhex(sys.argv[1])
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout(20)
peer.connect(name)
data, descriptors, *_ = socket.recv_fds(peer, 64, 4)
print(len(data), len(descriptors))
"""

_SQUATTER = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(bytes.fromhex(sys.argv[1]))
listener.listen()
print("listening", flush=True)
peer, _ = listener.accept()
peer.settimeout(20)
regions = [os.memfd_create("bait") for _ in range(2)]
for region in regions:
    os.ftruncate(region, 4096)
heard = b""
try:
    socket.send_fds(peer, [({size}).to_bytes(8, "little")], regions)
    heard = peer.recv(64)
except OSError:  # the worker has hung up
    pass
print("heard", len(heard), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_handed_nothing() -> None:
    async def use(port: int, links: list[Link]) -> None:
        name = make_socket_name(port, RUN).hex()
        command = [sys.executable, "-c", _INTRUDER.format(user=NOBODY), name]
        intruder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        said, _ = await intruder.communicate()
        assert said.split() == [b"0", b"0"]
        assert not links

    with_listener(use)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_worker_does_not_talk_to_another_users_socket() -> None:
    name = make_socket_name(9, RUN).hex()
    command = [sys.executable, "-c", _SQUATTER.format(user=NOBODY, size=sum(SIZES)), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"listening\n"
        assert asyncio.run(same_host.connect_same_host((HERE, 9), RUN, SIZES)) is None
        assert squatter.stdout.readline() == b"heard 0\n"


def test_connections_leave_no_descriptor_and_no_memory_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:motley-upload")

    async def use(port: int, links: list[Link]) -> None:
        before = held()
        for _ in range(20):
            found = await same_host.connect_same_host((HERE, port), RUN, SIZES)
            assert found is not None
            found[0].close()
            del found
        await until(lambda: not links)
        assert held() == before

    with_listener(use)
