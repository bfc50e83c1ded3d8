"""Hosts on this machine: network namespaces on one switch, every port shaped to one rate.

The namespaces have no names: each lives as long as the process that holds it, which ends when its
standard input closes. So whatever ends the benchmark, Ctrl-C, a failure or kill -9, also takes
them away, and the machine's own network is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.rig.interface import INTERFACE

TOOLS = ("ip", "tc", "unshare", "nsenter")
_HOLD = ("sh", "-c", "echo here; exec cat >/dev/null")
_SUBNET = "10.77.91"
_LEAST_BUCKET = 96 * 1024
"""Bytes; below one 64 KB segment offload tbf splits packets and ruins the figure."""
_BUCKET_SECONDS = 0.002
"""What may go out at once after a pause: covers the timer noise of a busy machine."""


def missing() -> str | None:
    """Return why there can be no such network here, None if there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no network namespaces: {', '.join(absent)} missing (Debian: iproute2, util-linux)"
    try:
        with ShapedNetwork(1, 10**9):
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with tbf here: {error.stderr.strip()}"


class ShapedNetwork:
    """`hosts` namespaces on a bridge; each sends and receives at most `rate` bits a second."""

    def __init__(self, hosts: int, rate: int) -> None:
        self.rate = rate
        self.bucket = max(_LEAST_BUCKET, int(rate / 8 * _BUCKET_SECONDS))
        self._count = hosts
        self._stack = ExitStack()
        self._holders: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._switch = switch = self._hold()
            self._run(switch, "ip link add name bridge0 type bridge")
            self._run(switch, "ip link set bridge0 up")
            for index in range(self._count):
                host, port = self._hold(), f"port{index}"
                ends = f"name {port} type veth peer name {INTERFACE}"
                self._run(switch, f"ip link add {ends} netns {host}")
                self._run(switch, f"ip link set {port} master bridge0 up")
                self._run(host, f"ip addr add {self.address(index)}/24 dev {INTERFACE}")
                self._run(host, f"ip link set {INTERFACE} up")
                self._run(host, "ip link set lo up")
                self._shape(switch, port)
                self._shape(host, INTERFACE)
                self._holders.append(host)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"{_SUBNET}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Return what to put before a command so that it runs on a host."""
        return _entering(self._holders[host])

    def _hold(self) -> int:
        """Return the process id of a new namespace's holder."""
        holder = subprocess.Popen(
            [_path("unshare"), "--net", *_HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stack.callback(holder.wait, 10)
        assert holder.stdin is not None
        assert holder.stdout is not None
        self._stack.callback(holder.stdin.close)
        if not holder.stdout.readline():
            raise subprocess.CalledProcessError(
                holder.wait(10), "unshare", stderr="unshare --net failed"
            )
        holder.stdout.close()
        return holder.pid

    def _shape(self, holder: int, device: str) -> None:
        self._run(
            holder,
            f"tc qdisc add dev {device} root tbf rate {self.rate}bit burst {self.bucket} "
            "latency 50ms",
        )

    def _run(self, holder: int, command: str) -> None:
        words: Sequence[str] = command.split()
        subprocess.run(
            [*_entering(holder), *words],
            check=True,
            capture_output=True,
            text=True,
        )


def _entering(holder: int) -> list[str]:
    return [_path("nsenter"), f"--net=/proc/{holder}/ns/net", "--"]


def _path(tool: str) -> str:
    return shutil.which(tool) or tool
