"""The way out of a lab: slirp4netns sees what is meant for itself, and nothing else."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from tests.testbed.conftest import NewHost
from tests.testbed.lab import Lab
from tests.testbed.namespaces import GATEWAY, NETWORK

pytestmark = pytest.mark.testbed

# Print the hardware and the IP address of each frame that leaves the bridge for slirp4netns.
LISTEN = """
import socket
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
frames.bind(("tap0", 0))
print("listening", flush=True)
while True:
    frame, (_, _, direction, *_) = frames.recvfrom(65536)
    if direction == socket.PACKET_OUTGOING:
        print(frame[:6].hex(":"), socket.inet_ntoa(frame[30:34]), flush=True)
"""
SEND = """
import socket, sys
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
for address in sys.argv[1:]:
    datagrams.sendto(b"for the lab alone", (address, 5353))
"""
CONNECT = "import socket, sys; sys.exit(socket.socket().connect_ex((sys.argv[1], 80)))"


def test_nothing_is_flooded_to_the_way_out(lab: Lab, new_host: NewHost) -> None:
    """It would connect to any address of a frame, on the machine's own network."""
    one, two = new_host(), new_host()
    listener = lab.command([sys.executable, "-c", LISTEN])
    with subprocess.Popen(listener, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        try:
            assert listening.stdout.readline() == "listening\n"
            card = one.exec(["cat", "/sys/class/net/eth0/address"]).stdout.strip()
            known = ["ip", "neigh", "replace", one.ip, "lladdr", card, "dev", "eth0"]
            send = ["python3", "-c", SEND, one.ip, f"{NETWORK}.255", "224.0.0.251", "239.1.2.3"]
            one.cut()
            for run in (two.exec, lab.run):  # another host, and the operator
                run(known)
                run(send)

            # It answers that its own address leads nowhere; by then it has what came before.
            ask = ["python3", "-c", CONNECT, GATEWAY]
            answers = [run(ask, check=False).returncode for run in (two.exec, lab.run)]
            assert answers == [errno.ENETUNREACH] * 2, "the gateway does not answer"
            seen: list[list[str]] = []
            while [GATEWAY] not in (frame[1:] for frame in seen):
                seen.append(listening.stdout.readline().split())
        finally:
            listening.terminate()
    assert [frame for frame in seen if not frame[0].startswith("52:55:")] == []
