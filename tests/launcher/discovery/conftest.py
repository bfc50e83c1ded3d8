"""Machines on a network of their own: sshd and an mDNS responder in a network namespace each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks.rig.network import ShapedNetwork, missing
from tests import ROOT
from tests.launcher.sshd import QUICK_KEYS, make_key
from tests.waiting import wait_for

PROGRAMS = Path(sys.executable).parent
MEGABIT = 10**6


class Machine:
    """A host on the switch, which can be switched on and off."""

    def __init__(self, network: ShapedNetwork, index: int, folder: Path) -> None:
        self.name = f"m{index}"
        self.address = network.address(index)
        self.folder = folder
        self._inside = network.inside(index)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir()
        make_key(folder / "host")

    @property
    def known_line(self) -> str:
        kind, key = (self.folder / "host.pub").read_text().split()[:2]
        return f"{self.address} {kind} {key}\n"

    @property
    def fingerprint(self) -> str:
        command = ["ssh-keygen", "-lf", str(self.folder / "host.pub")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]

    def run(self, command: str) -> None:
        subprocess.run([*self._inside, *command.split()], check=True, capture_output=True)

    def serve(self, user_key: Path) -> None:
        """Start its sshd; it knows a Python, and nothing of Motley."""
        sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
        assert sshd is not None
        (self.folder / "authorized_keys").write_bytes(user_key.with_suffix(".pub").read_bytes())
        path = f"{Path(sys.base_prefix, 'bin')}:/usr/sbin:/usr/bin:/sbin:/bin"
        (self.folder / "sshd_config").write_text(
            f"ListenAddress {self.address}\nHostKey {self.folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nSetEnv PATH={path}\n"
            f"{QUICK_KEYS}"
        )
        # A host name of its own, as every machine has.
        script = f"hostname {self.name}; exec {sshd} -D -e -f {self.folder}/sshd_config"
        self._start("sshd", ["unshare", "--uts", "sh", "-c", script])
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{self.address}/22"]
        wait_for(
            lambda: subprocess.run([*self._inside, *probe], capture_output=True).returncode == 0,
            "sshd",
            seconds=60.0,
        )

    def hold(self, port: int) -> None:
        """Start a program that has a TCP port, as its `holder`."""
        code = f"import socket; _ = socket.create_server(({self.address!r}, {port}))"
        command = [sys.executable, "-c", f"{code}; print('held', flush=True); input()"]
        process = self._start("holder", command)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

    def announce(
        self, name: str | None = None, address: str | None = None, *, without_address: int = 0
    ) -> None:
        """Start its responder, also for that many names without an address; returns then."""
        words = [name or self.name, address or self.address, "22", str(without_address)]
        command = [sys.executable, "-P", "-m", "tests.launcher.discovery.announcer", *words]
        process = self._start("responder", command)
        assert process.stdout is not None
        assert process.stdout.readline() == "announced\n"

    def end(self, *which: str) -> None:
        """End its sshd, its responder, or both."""
        for name in which or tuple(self._processes):
            process = self._processes.pop(name, None)
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()  # a responder says goodbye
                if name == "sshd":
                    process.terminate()
                process.wait(60.0)
                if process.stdout is not None:
                    process.stdout.close()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[str]:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self._processes[name] = subprocess.Popen(
                [*self._inside, *command],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self._processes[name]


class Lan:
    """An operator and three machines on a switch of 200 Mbit/s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._network = ShapedNetwork(4, 200 * MEGABIT)
        self.machines: list[Machine] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self._network)
        self.key = make_key(self.folder / "user")
        self.known_hosts = self.folder / "known_hosts"
        self.config = self.folder / "ssh_config"
        for index in (1, 2, 3):
            machine = Machine(self._network, index, self.folder / f"m{index}")
            self._stack.callback(machine.end)
            self.machines.append(machine)
            machine.serve(self.key)
        self.reset()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def reset(self) -> None:
        """Let ssh know and trust all machines, and nothing be announced."""
        self.known_hosts.write_text("".join(machine.known_line for machine in self.machines))
        self.config.write_text(
            f"Host *\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )

    def operate(self, command: str) -> None:
        """Run a command on the operator's machine."""
        subprocess.run(
            [*self._network.inside(0), *command.split()], check=True, capture_output=True
        )

    def udp_port_is_taken(self, port: int) -> bool:
        """Whether a program of the operator's machine has a UDP port."""
        inside = self._network.inside(0)
        table = subprocess.run([*inside, "cat", "/proc/net/udp"], capture_output=True, text=True)
        return f":{port:04X} " in table.stdout

    @contextmanager
    def operating(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        """Run a program on the operator's machine meanwhile."""
        inside = self._network.inside(0)
        with subprocess.Popen(
            [*inside, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def discover(
        self, *arguments: str | Path, code: int = 0, seconds: float = 200
    ) -> tuple[dict[str, Any], str]:
        """Run `launch discover --json` there; return what it printed, and what it said."""
        command = [*self._network.inside(0), sys.executable, "-m", "launcher.cli", "discover"]
        command += ["--json", "--seconds", "2", "--ssh-config", str(self.config)]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == code, done.stderr + done.stdout
        assert all(
            line.startswith(("launch: ", "host", "no link", "the link", "mDNS"))
            for line in done.stderr.splitlines()
        ), done.stderr
        tree, _ = json.JSONDecoder().raw_decode(done.stdout)
        return tree, done.stderr


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    """Yield a network of its own."""
    if reason := missing():
        pytest.skip(reason)
    if shutil.which("sshd") is None and shutil.which("sshd", path="/usr/sbin:/sbin") is None:
        pytest.skip("needs sshd (openssh-server)")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with Lan(tmp_path_factory.mktemp("lan")) as lan:
        yield lan


@pytest.fixture
def lan(network: Lan) -> Iterator[Lan]:
    """Yield the network, on which nothing is announced yet."""
    network.reset()
    yield network
    for machine in network.machines:
        machine.end("responder")
