"""The namespaces of a lab, its switch, and its way to the network.

One process (lab.sh) is the first of a pid namespace: hosts, uplink and mounts die with it. The
uplink is slirp4netns on the same bridge, so the machine needs no bridge, no NAT and no forwarding.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from tests.testbed.errors import LabError
from tests.testbed.processes import (
    Completed,
    Process,
    command_line,
    everyone,
    run,
    wait_until,
)

FIRST = Path(__file__).with_name("lab.sh")
NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.2"
NAME_SERVER = f"{NETWORK}.3"
Word = str | os.PathLike[str]


class Namespaces:
    """The namespaces of the lab in `folder`, which knows them by `lab.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "lab.json"
        self._held: int | None = None  # the lab ends when this pipe is closed, or stays on its word
        self._child: subprocess.Popen[Any] | None = None

    def make(self, attached: bool) -> None:
        """Make them and start their first process; `attached`: it ends with this process."""
        key = f"motley-testbed-{os.getpid()}-{os.urandom(4).hex()}"
        self._file.write_text(json.dumps({"key": key}), encoding="utf-8")
        kinds = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        command = ["unshare", *kinds, "--propagation", "private", "--fork"]
        command += ["--kill-child=SIGKILL", "--", str(FIRST), "enter", str(self._folder), key]
        hold, self._held = os.pipe()
        told_read, told_write = os.pipe()
        try:
            with (self._folder / "log").open("w") as log:
                streams: dict[str, Any] = {"stdin": hold, "stdout": told_write, "stderr": log}
                if attached:
                    self._child = subprocess.Popen(
                        command, cwd="/", start_new_session=True, **streams
                    )
                else:
                    subprocess.run(["setsid", "--fork", *command], check=True, cwd="/", **streams)
        finally:
            os.close(hold)
            os.close(told_write)
        with os.fdopen(told_read) as told:
            number = told.readline().strip()
            first = Process.of(int(number)) if number.isdigit() else None
            if first is None or told.readline() != "ready\n":
                raise LabError(f"the lab did not start: {self._last_words()}")
        self._connect(first)
        known = {"key": key, "first": [first.pid, first.started]}
        self._file.write_text(json.dumps(known), encoding="utf-8")
        self._join_uplink()
        if not attached:
            os.write(self._held, b"stay\n")

    def _connect(self, first: Process) -> None:
        """Start slirp4netns: a gateway and a name server for every host."""
        network = ["--netns-type=path", f"/proc/{first.pid}/ns/net", "tap0"]
        options = [f"--cidr={NETWORK}.0/24", "--disable-host-loopback"]
        ready_read, ready_write = os.pipe()
        try:
            with (self._folder / "log").open("a") as log:
                # In the lab's pid namespace, so that it dies with it, but in the machine's network.
                command = ["nsenter", f"--target={first.pid}", "--pid", "--", "setsid", "--fork"]
                command += ["slirp4netns", f"--ready-fd={ready_write}", *options, *network]
                subprocess.run(
                    command,
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[ready_write],
                    cwd="/",
                )
        finally:
            os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            if ready.read(1) != "1":
                raise LabError(f"no uplink: {self._last_words()}")

    def _join_uplink(self) -> None:
        """Put slirp4netns on the bridge, and let it see what is for its own two addresses alone.

        It takes a frame for any host and connects to that address on the machine's network, so
        nothing may be flooded to it: neither what is for a host whose cable is cut nor broadcasts.
        Since it does not see who asks for its addresses either, the bridge answers.
        """
        self.inside("ip", "link", "set", "tap0", "master", "tb0", "up")
        flags = ["flood", "off", "mcast_flood", "off", "bcast_flood", "off", "neigh_suppress", "on"]
        self.inside("bridge", "link", "set", "dev", "tap0", *flags)
        for ip in (GATEWAY, NAME_SERVER):
            hardware = "52:55:" + ":".join(f"{int(part):02x}" for part in ip.split("."))  # its rule
            self.inside("bridge", "fdb", "add", hardware, "dev", "tap0", "master", "static")
            entry = ["neigh", "add", ip, "lladdr", hardware, "dev", "tb0", "nud", "permanent"]
            self.inside("ip", *entry)

    def remove(self) -> None:
        """End every process in them and remove their cgroup, however far `make` has come."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        key = self._known().get("key")
        if key is None:
            return

        def ended() -> bool:
            found = [pid for pid in everyone() if {str(FIRST), key} <= {*command_line(pid)}]
            for process in filter(None, map(Process.of, found)):
                process.kill()
            return not found

        wait_until(ended, 20, f"{key}: its first process does not end")
        if self._child is not None:
            self._child.wait(20)
            self._child = None
        forget = ["unshare", "--mount", "--propagation", "private", "--", FIRST, "forget"]
        forget += [self._folder, key]
        last = f"cgroup {key}: not empty"
        wait_until(lambda: run(forget, check=False).returncode == 0, 20, last)

    def _last_words(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"

    def _known(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}

    @property
    def first(self) -> Process | None:
        """Their first process, None when they are not (completely) there."""
        pair = self._known().get("first")
        process = Process(*pair) if pair else None
        return process if process and process.alive else None

    def enter(self, *argv: Word) -> list[str]:
        """Return the machine's command that runs `argv` in them."""
        if (first := self.first) is None:
            raise LabError(f"{self._folder}: no lab is up; python -m tests.testbed up")
        kinds = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        return ["nsenter", f"--target={first.pid}", *kinds, "--", *map(str, argv)]

    def inside(
        self,
        *argv: Word,
        check: bool = True,
        input: str | None = None,
        log: IO[str] | None = None,
    ) -> Completed:
        """Run a short command of the test bed itself in them.

        With a log the outputs go there: what the command leaves behind may keep them open.
        """
        command = self.enter(*argv)
        if log is None:
            return run(command, check=check, input=input)
        subprocess.run(command, check=check, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return subprocess.CompletedProcess(command, 0, "", "")
