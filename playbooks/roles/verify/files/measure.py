"""Measures a folder or a link and prints one JSON line. Sent to a host over SSH, never left there.

    measure.py folder PATH SECONDS
    measure.py listen ADDRESS PORT SECONDS PEER...
    measure.py link ADDRESS PORT SECONDS

Standard library only, for Python 3.10 and later.
"""

import contextlib
import json
import socket
import statistics
import struct
import subprocess
import sys
import time

ROUNDS = 5
BLOCK = bytes(64 * 1024)


def folder(path, seconds):
    """Time writes (to the disk behind it) and reads, in a child that may hang.

    A file system whose server is gone puts its caller to sleep for good, where not even SIGKILL
    reaches it. So the caller is a child, and is not waited for beyond the deadline.
    """
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", CHILD, path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.5)  # one that can die does so now
        for pipe in (child.stdout, child.stderr):
            pipe.close()
        return {"error": f"no answer within {seconds:g} s: its server is gone?"}
    if child.returncode:
        return {"error": (err.decode("utf-8", "replace").strip().splitlines() or ["?"])[-1]}
    return json.loads(out.decode())


CHILD = """
import json, os, statistics, sys, tempfile, time
folder = os.path.realpath(sys.argv[1])
try:
    handle, name = tempfile.mkstemp(prefix=".motley-verify-", dir=folder)
except OSError as error:
    sys.exit(folder + ": " + error.strerror)
writes, reads = [], []
try:
    for number in range(5):
        start = time.perf_counter()
        os.pwrite(handle, os.urandom(4096), 0)
        os.fsync(handle)
        writes.append(time.perf_counter() - start)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # not what this host remembers
        start = time.perf_counter()
        with open(name, "rb") as stream:
            stream.read()
        reads.append(time.perf_counter() - start)
finally:
    os.close(handle)
    os.unlink(name)
mounts = [line.split()[1:3] for line in open("/proc/mounts")]
kind = max((m for m in mounts if (folder + "/").startswith(m[0].rstrip("/") + "/")),
           key=lambda m: len(m[0]), default=["", ""])[1]
figure = lambda values: round(1000 * statistics.median(values), 3)
print(json.dumps({"write_ms": figure(writes), "read_ms": figure(reads), "file_system": kind}))
"""


def listen(address, port, seconds, peers):
    """Serve `link` to the peers, one after another, until each was here or the time is over.

    One address, never all of them; clients outside the cluster are disconnected.
    """
    end = time.monotonic() + seconds
    served = []
    try:
        server = socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError as error:
        return {"error": f"cannot listen on {address} port {port}: {error.strerror}"}
    with server:
        while set(served) != set(peers) and time.monotonic() < end:
            server.settimeout(max(0.1, end - time.monotonic()))
            try:
                connection, peer = server.accept()
            except TimeoutError:
                break
            with connection:
                if peer[0] in peers:
                    try:
                        answer_link(connection)
                    except (OSError, EOFError):
                        continue
                    served.append(peer[0])
    return {"served": served}


def answer_link(connection):
    """The listening side of `ask_link`."""
    connection.settimeout(10)
    (seconds,) = struct.unpack("!d", read(connection, 8))
    for _ in range(ROUNDS):
        connection.sendall(read(connection, 8))
    connection.sendall(struct.pack("!d", swallow(connection)))
    pour(connection, min(seconds, 10))


def link(address, port, seconds):
    """Return the round trip, and Mbit/s to and from the listener."""
    end = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5)
            break
        except OSError as error:  # it may not listen yet
            if time.monotonic() > end:
                return {"error": f"{address} port {port}: {error.strerror or error}"}
            time.sleep(0.1)
    with connection:
        connection.settimeout(10)
        try:
            return ask_link(connection, seconds)
        except (OSError, EOFError) as error:
            return {"error": f"{address} port {port}: {error}"}


def ask_link(connection, seconds):
    """Measure from the calling side: small messages there and back, then a stream each way."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(struct.pack("!d", seconds))
    trips = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        connection.sendall(struct.pack("!Q", number))
        read(connection, 8)
        trips.append(time.perf_counter() - start)
    pour(connection, seconds)
    (there,) = struct.unpack("!d", read(connection, 8))
    back = swallow(connection)
    return {
        "round_trip_ms": round(1000 * statistics.median(trips), 3),
        "to_mbit_s": round(there),
        "from_mbit_s": round(back),
    }


def pour(connection, seconds):
    """Send blocks for so long, each with its length before it; a length of 0 ends the stream."""
    end = time.monotonic() + seconds
    block = struct.pack("!I", len(BLOCK)) + BLOCK
    while time.monotonic() < end:
        connection.sendall(block)
    connection.sendall(struct.pack("!I", 0))


def swallow(connection):
    """Receive such a stream; returns Mbit/s as it arrived, whatever the sender's buffers hold."""
    received = 0
    start = time.monotonic()
    while True:
        (length,) = struct.unpack("!I", read(connection, 4))
        if length == 0:
            return received * 8e-6 / max(time.monotonic() - start, 1e-6)
        received += len(read(connection, length))


def read(connection, count):
    """Return exactly so many bytes."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the other side hung up")
        data += part
    return bytes(data)


def main(arguments):
    """Print what was measured; an error is an answer too."""
    verb, first = arguments[0], arguments[1]
    if verb == "folder":
        answer = folder(first, float(arguments[2]))
    elif verb == "listen":
        answer = listen(first, int(arguments[2]), float(arguments[3]), arguments[4:])
    else:
        answer = link(first, int(arguments[2]), float(arguments[3]))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
