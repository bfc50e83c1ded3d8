"""What a link costs before the exchange does anything: processor seconds a GB that crosses it.

    python benchmarks/exchange_floor.py [--rate 1000] [--megabytes 150] [--rounds 3]

One process sends to another over a shaped link between two network namespaces, with plain sockets
and with mutual TLS by Python's `ssl`, in the largest pieces that it takes. Counted is what each
process used, the kernel's work in its name included; a coordinator does as much of both for each
GB in and out. The medians of all rounds, and TLS over plain sockets. Needs root.
JSON: benchmarks/results/exchange_floor.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig.network import ShapedNetwork, missing
from trainer.exchange.transport import tls

PORT = 7777
PIECE = 256 * 1024
PATIENCE = 120.0
"""Seconds that one transfer may take."""


def main() -> int:
    """Measure, print, write; or be one end of the link."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--end", nargs=3, metavar=("ROLE", "HOST", "FOLDER"), help="for itself")
    options = parser.parse_args()
    if options.end:
        role, host, folder = options.end
        print(transfer(role, host, folder, 10**6 * options.megabytes), flush=True)
        return 0
    if reason := missing():
        skip(reason)
    report = Report("exchange_floor")
    with (
        ShapedNetwork(2, options.rate * 10**6) as network,
        tempfile.TemporaryDirectory() as scratch,
    ):
        write_certificates(Path(scratch), 1, [network.address(0)])
        found = {
            way: measure(network, scratch if way == "TLS" else "", options)
            for way in ("plain sockets", "TLS")
        }
    for end in ("receive", "send"):
        plain, encrypted = found["plain sockets"][end], found["TLS"][end]
        report.add(
            Ratio(f"{options.rate} Mbit/s, to {end} with TLS", encrypted / plain, "plain sockets"),
            plain_cpu_seconds_a_gigabyte=round(plain, 2),
            tls_cpu_seconds_a_gigabyte=round(encrypted, 2),
        )
    return report.write()


def measure(network: ShapedNetwork, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the processor seconds a GB of both ends."""
    seconds: dict[str, list[float]] = {"receive": [], "send": []}
    for _ in range(options.rounds):
        ends: dict[str, subprocess.Popen[str]] = {}
        for role, host in (("receive", 0), ("send", 1)):
            command = [sys.executable, __file__, "--megabytes", str(options.megabytes)]
            end = ["--end", role, network.address(0), folder]
            started = subprocess.Popen(
                [*network.inside(host), *command, *end], stdout=subprocess.PIPE, text=True
            )
            ends[role] = started
            if role == "receive":
                assert started.stdout is not None
                started.stdout.readline()  # it listens
        for role, process in ends.items():
            output, _ = process.communicate(timeout=PATIENCE)
            seconds[role].append(json.loads(output) * 1e9 / (10**6 * options.megabytes))
    return {role: statistics.median(found) for role, found in seconds.items()}


def transfer(role: str, host: str, folder: str, size: int) -> float:
    """Be one end, and return the processor seconds that `size` bytes took."""
    receives = role == "receive"
    if receives:
        with socket.create_server((host, PORT)) as door:
            print("listening", flush=True)
            connection, _ = door.accept()
    else:
        connection = socket.create_connection((host, PORT))
    with connection:
        connection.settimeout(PATIENCE)
        if folder:
            own = Path(folder) / ("coordinator" if receives else "rank-0")
            context = tls.context(own, server=receives)
            connection = context.wrap_socket(connection, server_side=receives)
        piece, done, before = memoryview(bytearray(PIECE)), 0, processor_seconds()
        while done < size:
            rest = piece[: size - done]
            count = connection.recv_into(rest) if receives else connection.send(rest)
            if not count:
                raise ConnectionError("the other end closed the link")
            done += count
        used = processor_seconds() - before
        # The receiver says when all is here: a sender that closes first could cut it off.
        if receives:
            connection.sendall(b".")
        else:
            connection.recv(1)
        connection.close()
    return used


def processor_seconds() -> float:
    """Return what this process has used, in user space and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
