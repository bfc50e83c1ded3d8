"""The exchange beside a bare star in Python: the same bytes, sockets and sums, and nothing else.

    python benchmarks/exchange_star.py [--rate 1000] [--megabytes 5.3] [--steps 40] [--rounds 3]

The bare star has three workers, two on the server's host and one behind a shaped link; a server
adds their blocks, divides, and sends each average at once. A thread for each direction of each
connection blocks in it. There are no frames, no joins, no checks, no ledger and no optimizer, and
averages in bf16 are not decoded again for their norm. With TLS the remote worker has a connection
for each direction, since two threads may not use one; local workers use loopback TCP.

Measured as in `exchange.py`, from the first worker's start to the last average at the slowest, all
started together: the bare star in plaintext and with TLS, and the exchange itself, in turn in each
round. The ratios are medians of all rounds over the wire's limit, and the exchange over the bare
star with TLS. Needs root. JSON: benchmarks/results/exchange_star.json.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from exchange import REST, USUAL, WARM_UP, Star, elements_of
from exchange_floor import processor_seconds
from numpy.typing import NDArray
from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig import synthetic
from benchmarks.rig.network import ShapedNetwork, missing
from trainer.exchange.protocol.compression.choice import make_codec
from trainer.exchange.transport import tls

PLACEMENT = "2 local + 1 remote"
HOSTS = (0, 0, 1)
WAYS = ("plaintext", "TLS")
PORT = 7800
"""The server's; the next one is for the way down of a worker with TLS."""
PATIENCE = 60.0
Bytes = NDArray[np.uint8]


def main() -> int:
    """Measure, print, write; or be one process of the bare star."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--megabytes", type=float, default=5.3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--process", help="JSON, for itself")
    options = parser.parse_args()
    if options.process:
        Process(**json.loads(options.process)).run()
        return 0
    if reason := missing():
        skip(reason)
    report = Report("exchange_star")
    with (
        ShapedNetwork(len(set(HOSTS)), options.rate * 10**6) as network,
        tempfile.TemporaryDirectory() as scratch,
    ):
        folder = Path(scratch)
        write_certificates(folder, len(HOSTS), [network.address(0)])
        for codec in USUAL:
            compare(report, network, folder, codec, options)
    return report.write()


def compare(
    report: Report, network: ShapedNetwork, folder: Path, codec: str, options: argparse.Namespace
) -> None:
    """Run the bare star and the exchange in turn and report their ratios."""
    star = Star(network, options.rate, options.megabytes, codec, PLACEMENT, options.steps)
    seconds: dict[str, list[float]] = {"plaintext": [], "TLS": [], "the exchange": []}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            spans, used = bare_star(network, folder if way == "TLS" else None, codec, options)
            seconds[way].append(statistics.median(spans[WARM_UP:]))
            cpu[way].append(used / star.remote_gigabytes)
        seconds["the exchange"].append(star.measure(Report("one round"), folder))
    medians = {what: statistics.median(found) for what, found in seconds.items()}
    limit = f"the wire's limit ({1e3 * star.limit:.1f} ms)"
    for what, median in medians.items():
        name = what if what == "the exchange" else f"a bare star, {what}"
        rounds = [round(1e3 * found, 2) for found in seconds[what]]
        figures: dict[str, object] = {"milliseconds": rounds}
        if what in cpu:
            each = [round(found, 2) for found in cpu[what]]
            figures["server_cpu_seconds_a_remote_gigabyte"] = each
        report.add(Ratio(f"{star.name}: {name}", median / star.limit, limit), **figures)
    ratio = medians["the exchange"] / medians["TLS"]
    report.add(Ratio(f"{star.name}: the exchange", ratio, "the bare star with TLS"))


def bare_star(
    network: ShapedNetwork, folder: Path | None, codec: str, options: argparse.Namespace
) -> tuple[list[float], float]:
    """Return the seconds of every step of a bare star, and its server's processor time a step."""
    steps = WARM_UP + options.steps
    spec = {"elements": elements_of(options.megabytes), "codec": codec, "steps": steps}
    spec["address"] = network.address(0)
    spec["folder"] = str(folder) if folder else ""
    with ExitStack() as stack:

        def start(rank: int | None, host: int) -> subprocess.Popen[str]:
            command = [sys.executable, __file__, "--process", json.dumps({**spec, "rank": rank})]
            process = subprocess.Popen(
                [*network.inside(host), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def said(process: subprocess.Popen[str]) -> float:
            assert process.stdout
            return float(process.stdout.readline())

        server = start(None, 0)
        said(server)  # it listens
        workers = [start(rank, host) for rank, host in enumerate(HOSTS)]
        spans: list[float] = []
        for process in workers:
            said(process)  # it is connected
        for _ in range(steps):
            time.sleep(REST)
            for process in workers:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
            starts, ends = [said(process) for process in workers], [said(p) for p in workers]
            spans.append(max(ends) - min(starts))
        return spans, said(server) / steps


class Process:
    """The server of a bare star, or one of its workers."""

    def __init__(
        self, elements: int, codec: str, steps: int, address: str, folder: str, rank: int | None
    ) -> None:
        self.sizes = [block.size for block in synthetic.layout(elements).blocks]
        self.codec = make_codec(codec)
        self.steps = steps
        self.address = address
        self.folder = folder
        self.rank = rank
        self.encoded = [self.codec.nbytes(size) for size in self.sizes]

    def run(self) -> None:
        """Take all steps."""
        if self.rank is None:
            self._serve()
        else:
            self._work(self.rank)

    def _serve(self) -> None:
        with ExitStack() as stack:
            doors = [stack.enter_context(socket.create_server(("", PORT + way))) for way in (0, 1)]
            print(time.monotonic(), flush=True)
            accepted = dict(self._accept(doors[0]) for _ in HOSTS)
            remote = HOSTS.index(1)
            up = [accepted[rank] for rank in range(len(HOSTS))]
            down = list(up)
            if self.folder:
                down[remote] = self._accept(doors[1])[1]
            inbound = [[np.empty(size, np.uint8) for size in self.encoded] for _ in up]
            outbound = [queue.SimpleQueue[Bytes]() for _ in up]
            here, lock = [0] * len(self.sizes), threading.Lock()

            def receive(rank: int) -> None:
                for _ in range(self.steps):
                    for block, into in enumerate(inbound[rank]):
                        receive_all(up[rank], into)
                        with lock:
                            here[block] += 1
                            whole = here[block] % len(up) == 0
                        if whole:
                            average = self._average(block, [of[block] for of in inbound])
                            for waiting in outbound:
                                waiting.put(average)

            def send(rank: int) -> None:
                for _ in range(self.steps * len(self.sizes)):
                    down[rank].sendall(outbound[rank].get().data)

            threads = [
                threading.Thread(target=way, args=(rank,))
                for rank in range(len(up))
                for way in (receive, send)
            ]
            before = processor_seconds()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(processor_seconds() - before, flush=True)

    def _average(self, block: int, contributions: list[Bytes]) -> Bytes:
        total = np.empty(self.sizes[block], np.float32)
        part = np.empty_like(total)
        self.codec.decode(contributions[0], total)
        for other in contributions[1:]:
            if self.codec.name == "fp32":
                np.add(total, other.view(np.float32), out=total)
            else:
                self.codec.decode(other, part)
                np.add(total, part, out=total)
        np.divide(total, np.float32(len(contributions)), out=total)
        if self.codec.name == "fp32":
            return total.view(np.uint8)
        return self.codec.encode(total)

    def _work(self, rank: int) -> None:
        up = down = self._connect(rank, 0)
        if self.folder and HOSTS[rank]:
            down = self._connect(rank, 1)
        random = np.random.default_rng(rank)
        gradient = [random.standard_normal(size, np.float32) for size in self.sizes]
        steps = queue.SimpleQueue[None]()

        def send() -> None:
            for _ in range(self.steps):
                steps.get()
                for values in gradient:
                    exact = self.codec.name == "fp32"
                    encoded = values.view(np.uint8) if exact else self.codec.encode(values)
                    up.sendall(encoded.data)

        threading.Thread(target=send).start()
        average = [np.empty(size, np.float32) for size in self.sizes]
        print(time.monotonic(), flush=True)
        for _ in range(self.steps):
            sys.stdin.readline()
            started = time.monotonic()
            steps.put(None)
            for size, into in zip(self.encoded, average, strict=True):
                if self.codec.name == "fp32":
                    receive_all(down, into.view(np.uint8))
                else:
                    received = np.empty(size, np.uint8)
                    receive_all(down, received)
                    self.codec.decode(received, into)
            print(f"{started}\n{time.monotonic()}", flush=True)

    def _accept(self, door: socket.socket) -> tuple[int, socket.socket]:
        """Return a worker's rank and its connection."""
        connection, _ = door.accept()
        tune(connection)
        (rank,) = connection.recv(1)
        if self.folder and HOSTS[rank]:
            context = tls.context(Path(self.folder) / "coordinator", server=True)
            return rank, context.wrap_socket(connection, server_side=True)
        return rank, connection

    def _connect(self, rank: int, way: int) -> socket.socket:
        connection = socket.create_connection((self.address, PORT + way))
        tune(connection)
        connection.sendall(bytes([rank]))
        if self.folder and HOSTS[rank]:
            context = tls.context(Path(self.folder) / f"rank-{rank}", server=False)
            return context.wrap_socket(connection)
        return connection


def tune(connection: socket.socket) -> None:
    """Send at once, and wait no longer than a test may take."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(PATIENCE)


def receive_all(connection: socket.socket, into: Bytes) -> None:
    """Fill an array."""
    rest = into.data
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the other end closed the connection")
        rest = rest[count:]


if __name__ == "__main__":
    sys.exit(main())
